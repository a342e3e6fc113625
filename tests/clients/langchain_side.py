"""langchain-openai, as its users use it, against a chat endpoint: `URL MODEL TOKENIZER`."""

from __future__ import annotations

import sys
from typing import Annotated

import pydantic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class Person(pydantic.BaseModel, extra="forbid"):
    """Somebody."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=99)


Small = Annotated[int, pydantic.Field(ge=0, le=99)]


@tool
def add(first: Small, second: Small) -> int:
    """Add two numbers."""
    return first + second


def main() -> None:
    """Raise where an answer is not what was asked for."""
    url, name, _ = sys.argv[1:]
    model = ChatOpenAI(model=name, base_url=url, api_key="none", max_retries=0, seed=3)
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke("Who is it?")
        assert isinstance(person, Person)
        print("with_structured_output", method, person)
    bound = model.bind_tools([add], tool_choice="any", strict=True, parallel_tool_calls=False)
    whole = bound.invoke("What is it?")
    [call] = whole.tool_calls
    assert call["name"] == "add"
    assert isinstance(add.invoke(call["args"]), int)
    streamed = None
    for chunk in bound.stream("What is it?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]
    asked = {"model": name, "base_url": url, "api_key": "none", "max_retries": 0}
    responses = ChatOpenAI(**asked, use_responses_api=True, output_version="responses/v1")
    once = {"tool_choice": "any", "strict": True, "parallel_tool_calls": False}
    said = responses.bind_tools([add], **once).invoke("What is it?")
    assert said.tool_calls, said
    print("bind_tools", call["args"])


if __name__ == "__main__":
    main()
