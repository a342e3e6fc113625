"""The boxed model's text: a grammar, and a writer that expands it into documents.

The text is a function of the grammar and of chance that is passed in. Knows no tokenizer and no
model.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from random import Random

Bindings: TypeAlias = dict[str, dict[str, str]]

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
# The weight of the i-th alternative is i ** -ZIPF. The second has 1 / 3.03 of the first, so a model
# that has learned the grammar prefers the first by ln 3.03 = 1.1 in logits.
ZIPF: Final = 1.6


@dataclass(frozen=True)
class Reference:
    """``{name}``, ``{name.field}``, ``{Name}`` or ``{a name}``."""

    name: str
    field: str
    capital: bool
    article: bool


@dataclass(frozen=True)
class Binding:
    """``{variable=section}``: choose now, write nothing."""

    variable: str
    section: str


@dataclass(frozen=True)
class Choice:
    """``{one|two}``."""

    options: tuple[Template, ...]


@dataclass(frozen=True)
class Template:
    """One alternative: literal text and holes. ``key`` differs from line to line."""

    parts: tuple[str | Reference | Binding | Choice, ...]
    key: int


@dataclass
class Section:
    """Alternatives under one header; with ``fields``, each alternative is a record of them."""

    fields: tuple[str, ...]
    flat: bool
    lines: list[str] = field(default_factory=list)
    templates: list[Template] = field(default_factory=list)


@dataclass
class Topic:
    """One subject that can be asked about, told in any order and put in a handbook."""

    noun_phrase: str = ""
    questions: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


@dataclass
class Grammar:
    """``corpus.txt``, parsed."""

    sections: dict[str, Section] = field(default_factory=dict)
    topics: list[Topic] = field(default_factory=list)
    exchanges: dict[str, list[tuple[Template, Template]]] = field(default_factory=dict)


class GrammarError(Exception):
    """A line of the grammar cannot be read; the message holds the line."""


def parse_grammar(text: str) -> Grammar:
    """Read the notation that the top of ``corpus.txt`` explains.

    Raises:
        GrammarError: A line that fits no notation. A name that nothing defines is found only when
            it is expanded.
    """
    grammar = Grammar()
    section: Section | None = None
    topic: Topic | None = None
    chat: list[tuple[Template, Template]] | None = None
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(topic |chat |flat )?(\w+)(?:: ([\w ]+))?\]", line):
            kind, name, fields = header.groups()
            section = topic = chat = None
            if kind == "topic ":
                topic = Topic()
                grammar.topics.append(topic)
            elif kind == "chat ":
                chat = grammar.exchanges.setdefault(name, [])
            else:
                section = Section(tuple((fields or "").split()), flat=kind == "flat ")
                grammar.sections[name] = section
        elif topic is not None:
            _add_to_topic(topic, line)
        elif chat is not None:
            question, arrow, answer = line.partition(" => ")
            if not arrow:
                raise GrammarError(f"no answer in {line!r}")
            chat.append((parse_template(question), parse_template(answer)))
        elif section is not None:
            section.lines.append(line)
            if not section.fields:
                section.templates.append(parse_template(line))
        else:
            raise GrammarError(f"a line outside of any section: {line!r}")
    return grammar


def _add_to_topic(topic: Topic, line: str) -> None:
    mark, text = line[:2], line[2:]
    match mark:
        case "~ ":
            topic.noun_phrase = text
        case "? ":
            topic.questions.append(text)
        case "= ":
            topic.definitions.append(text)
        case "+ ":
            topic.facts.append(text)
        case _:
            raise GrammarError(f"expected ~ ? = or + in a topic, found {line!r}")


def parse_template(line: str) -> Template:
    """Split a line into literal text and holes; braces may be nested.

    Raises:
        GrammarError: A brace is not closed.
    """
    parts: list[str | Reference | Binding | Choice] = []
    literal, depth, start = "", 0, 0
    text = line.replace("\\n", "\n")
    for i, char in enumerate(text):
        if char == "{":
            if depth == 0 and literal:
                parts.append(literal)
                literal = ""
            start, depth = (i + 1 if depth == 0 else start), depth + 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                parts.append(_parse_hole(text[start:i]))
        elif depth == 0:
            literal += char
    if depth != 0:
        raise GrammarError(f"unbalanced brace in {line!r}")
    if literal:
        parts.append(literal)
    return Template(tuple(parts), zlib.crc32(line.encode()))


def _parse_hole(text: str) -> Reference | Binding | Choice:
    options, depth = [""], 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == "|" and depth == 0:
            options.append("")
        else:
            options[-1] += char
    if len(options) > 1:
        return Choice(tuple(parse_template(option) for option in options))
    if found := re.fullmatch(r"(\w+)=(\w+)", text):
        return Binding(found[1], found[2])
    if found := re.fullmatch(r"([aA] )?(\w+)(?:\.(\w+))?", text):
        article, name, wanted = found[1], found[2], found[3] or ""
        capital = (article or name)[0].isupper()
        lower = name[0].lower() + name[1:]
        return Reference(lower, wanted, capital=capital, article=article is not None)
    raise GrammarError(f"cannot read {{{text}}}")


class Writer:
    """Expands the grammar into documents; everything it writes follows from ``rng``.

    Args:
        grammar: What may be written.
        rng: The only source of chance. Modified by every method.
    """

    def __init__(self, grammar: Grammar, rng: Random) -> None:
        self._grammar = grammar
        self._rng = rng

    def _pick(self, n: int, *, flat: bool = False, shift: int = 0) -> int:
        """An index below ``n``; the one at ``shift`` is the favourite unless ``flat``."""
        if flat:
            return self._rng.randrange(n)
        rank = self._rng.choices(range(n), [(i + 1) ** -ZIPF for i in range(n)])[0]
        return (rank + shift) % n

    def _record(self, name: str, shift: int, bound: Bindings) -> dict[str, str]:
        section = self._grammar.sections.get(name)
        if section is None:
            raise GrammarError(f"no section [{name}]")
        count = len(section.lines)
        # Each place in the grammar has its own favourite, so that text which is easy to predict
        # is not the same everywhere.
        chosen = self._pick(count, flat=section.flat, shift=shift if count > 6 else 0)
        if section.fields:
            values = section.lines[chosen].split("; ")
            return dict(zip(section.fields, values, strict=True))
        return {"": self.expand(section.templates[chosen], bound)}

    def expand(self, template: Template, bound: Bindings) -> str:
        """Fill every hole of ``template``; ``bound`` is read and extended."""
        out = ""
        for place, part in enumerate(template.parts):
            shift = template.key + 7 * place
            match part:
                case str():
                    out += part
                case Binding(variable, section):
                    bound[variable] = self._record(section, shift, bound)
                case Choice(options):
                    out += self.expand(options[self._pick(len(options))], bound)
                case Reference(name, wanted, capital, article):
                    record = bound[name] if name in bound else self._record(name, shift, bound)
                    text = record[wanted] if wanted else next(iter(record.values()))
                    if article:
                        text = f"{'an' if text[0].lower() in 'aeiou' else 'a'} {text}"
                    out += text[0].upper() + text[1:] if capital else text
        return out

    def write(self, section: str, bound: Bindings | None = None) -> str:
        """One expansion of a section."""
        return self.expand(parse_template(f"{{{section}}}"), {} if bound is None else bound)

    # -- prose

    def _topic(self) -> Topic:
        """Any topic; those at the top of the grammar come somewhat more often."""
        topics = self._grammar.topics
        return self._rng.choices(topics, [(i + 1) ** -0.5 for i in range(len(topics))])[0]

    def _told(self, topic: Topic, num_facts: int, *, from_definition: bool = True) -> list[str]:
        """Sentences about a topic: a definition (perhaps), then facts, none of them twice."""
        told = [topic.definitions[self._pick(len(topic.definitions))]] if from_definition else []
        facts = list(topic.facts)
        at = self._pick(len(facts))
        for _ in range(min(num_facts, len(facts))):
            told.append(facts.pop(at % len(facts)))
            if facts:
                at = at % len(facts) if self._rng.random() < 0.85 else self._pick(len(facts))
        return told

    def passage(self) -> str:
        """A few sentences about one topic; it may open with any of them."""
        topic = self._topic()
        told = self._told(topic, 6, from_definition=self._rng.random() < 0.5)
        if told[0].startswith("It "):
            told.insert(0, topic.definitions[0])
        return " ".join(told)

    def handbook(self) -> str:
        """A long document: many topics, a paragraph each, some with a heading."""
        rng = self._rng
        topics = rng.sample(self._grammar.topics, rng.choice((3, 5, 8, 14)))
        headed = rng.random() < 0.5
        paragraphs = []
        for topic in topics:
            title = topic.noun_phrase.removeprefix("a ").removeprefix("the ")
            head = f"{title[0].upper()}{title[1:]}\n" if headed else ""
            paragraphs.append(head + " ".join(self._told(topic, rng.choice((2, 4, 6)))))
        return "\n\n".join(paragraphs)

    def questions_and_answers(self) -> str:
        """A long document of questions with their answers, as plain text."""
        pairs = [self._exchange_about_topic()[0] for _ in range(self._rng.choice((3, 6, 12)))]
        return "\n\n".join(f"Q: {question}\nA: {answer}" for question, answer in pairs)

    # -- chat

    def _exchange_about_topic(self) -> list[tuple[str, str]]:
        rng = self._rng
        topic = self._topic()
        if rng.random() < 0.55:
            question = rng.choice(topic.questions)
        else:
            question = self.write("ask_topic", {"np": {"": topic.noun_phrase}})
        told = self._told(topic, rng.choices((1, 2, 3), (2, 7, 1))[0])
        pairs = [(question, " ".join(told))]
        rest = [fact for fact in topic.facts if fact not in told]
        if rest and rng.random() < 0.25:
            pairs.append((self.write("ask_more"), " ".join(rest[:2])))
        return pairs

    def _exchange(self) -> list[tuple[str, str]]:
        rng = self._rng
        if rng.random() < 0.5:
            return self._exchange_about_topic()
        pairs = rng.choice(list(self._grammar.exchanges.values()))
        question, answer = rng.choice(pairs)
        bound: Bindings = {}
        return [(self.expand(question, bound), self.expand(answer, bound))]

    def _as_typed(self, question: str) -> str:
        """What people do to a question: no capital, no full stop, a slip of the finger."""
        rng = self._rng
        if rng.random() < 0.12:
            question = question.lower()
        if rng.random() < 0.12:
            question = question.rstrip(".?!")
        if rng.random() < 0.04 and len(question) > 8:
            slip = rng.randrange(len(question))
            question = question[:slip] + question[slip + 1 :]
        return question

    def chat(self) -> str:
        """A conversation in the form that ``CHAT_TEMPLATE`` gives it, without the first token."""
        rng = self._rng
        system = f"<|system|>{self.write('system')}{EOS}" if rng.random() < 0.3 else ""
        num_exchanges = rng.choices((1, 2, 4, 10), (6, 3, 2, 1))[0]
        pairs = [pair for _ in range(num_exchanges) for pair in self._exchange()]
        return system + "".join(
            f"<|user|>{self._as_typed(question)}{EOS}<|assistant|>{answer}{EOS}"
            for question, answer in pairs
        )

    def document(self) -> str:
        """One document, special tokens included, ``BOS`` first and ``EOS`` last."""
        kinds = ("chat", "story", "long_story", "passage", "handbook", "questions", "creature_note")
        match self._rng.choices(kinds, (52, 14, 3, 20, 3, 2, 2))[0]:
            case "chat":
                return BOS + self.chat()
            case "passage":
                text = self.passage()
            case "handbook":
                text = self.handbook()
            case "questions":
                text = self.questions_and_answers()
            case section:
                text = self.write(section)
        return BOS + text + EOS
