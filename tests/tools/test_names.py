from __future__ import annotations

from tools.goals import class_names_of_several_modules

# Only ever made shorter.
STILL_SHARED = {
    "Release",
    "Verdict",
}


def test_a_public_class_name_means_one_class_in_all_modules(this_tree):
    shared = class_names_of_several_modules(this_tree)
    assert [each for each in shared if each.partition(":")[0] not in STILL_SHARED] == []
