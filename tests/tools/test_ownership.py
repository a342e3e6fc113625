"""Only a request's own methods write its fields, and those of its timeline."""

from __future__ import annotations

import ast

import pytest

from pdserve.observe.clock import ManualClock
from pdserve.scheduler.life import Timeline
from pdserve.scheduler.request import Request
from tools.goals import SourceTree

OTHERS_REQUESTS = "connectors/conformance/"
OWNERS = {"pdserve/scheduler/request.py", "pdserve/scheduler/life.py"}
FIELDS = {name for name in Request.__slots__ if not name.startswith("_")}
MARKS = vars(Timeline(queued_s=ManualClock().monotonic_s())).keys()
NAMES = {"request", "planned", "view", "each"}
"""What requests are called outside of the scheduler, whose own values have other fields."""
CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "update"}


def _writes(source: ast.AST, *, in_scheduler: bool) -> list[str]:
    """Return what `source` writes into requests: line, field."""
    written: list[tuple[int, ast.expr]] = []
    for node in ast.walk(source):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                written += [(node.lineno, part) for each in targets for part in _parts(each)]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                written += [(node.lineno, part) for part in _parts(target)]
            case ast.Call(func=ast.Attribute(value=value, attr=change)) if change in CHANGING:
                written.append((node.lineno, value))
            case ast.Call(func=ast.Name(id="setattr"), args=[value, ast.Constant(value=name), *_]):
                written.append((node.lineno, ast.Attribute(value, str(name), ast.Store())))
    return [
        f"{line}: {ast.unparse(part)}"
        for line, part in written
        if isinstance(part, ast.Attribute) and _is_of_request(part, in_scheduler=in_scheduler)
    ]


def _parts(target: ast.expr) -> list[ast.expr]:
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [each for part in parts for each in _parts(part)]
        case ast.Starred(value=value) | ast.Subscript(value=value):
            return _parts(value)
        case _:
            return [target]


def _is_of_request(part: ast.Attribute, *, in_scheduler: bool) -> bool:
    match part.value:
        case ast.Attribute(attr="times"):
            return part.attr in MARKS
        case ast.Name(id="self"):
            return False
        case ast.Name(id=name):
            return part.attr in FIELDS and (in_scheduler or name in NAMES)
        case ast.Attribute() | ast.Subscript() | ast.Call():
            return part.attr in FIELDS and in_scheduler
        case _:
            return False


@pytest.mark.parametrize(
    "line",
    [
        "request.holds = set()",
        "planned.num_overtaken += 1",
        "request.handoff, self.x = None, 1",
        "request.output_token_ids.append(1)",
        "del request.holding",
        "request.times.first_token_s = 0.0",
        "self.running[name].holding = None",
        "request.output_token_ids[-1:] = [1]",
        "setattr(request, 'source', None)",
    ],
)
def test_a_write_from_outside_is_found(line: str) -> None:
    assert len(_writes(ast.parse(line), in_scheduler=True)) == 1


def test_only_a_request_writes_its_fields(this_tree: SourceTree) -> None:
    found = []
    for module in this_tree.product:
        path = module.path
        is_meant = path.startswith(("pdserve/", "connectors/")) and path not in OWNERS
        if is_meant and not path.startswith(OTHERS_REQUESTS):
            writes = _writes(module.syntax, in_scheduler=path.startswith("pdserve/scheduler/"))
            found += [f"{path}:{each}" for each in writes]
    assert not found, "\n".join(found)
