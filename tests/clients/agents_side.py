"""instructor and litellm, as their users use them, against an endpoint: `URL MODEL TOKENIZER`."""

from __future__ import annotations

import sys

import instructor
import litellm
import openai
import pydantic

PROMPT = [{"role": "user", "content": "Who is it?"}]


class Person(pydantic.BaseModel, extra="forbid"):
    """Somebody."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=99)


TOOL = {
    "type": "function",
    "function": {"name": "Person", "parameters": Person.model_json_schema()},
}


def main() -> None:
    """Raise where an answer is not what was asked for."""
    url, model, _ = sys.argv[1:]
    plain = openai.OpenAI(base_url=url, api_key="none")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        asked = {"model": model, "messages": PROMPT, "max_retries": 0, "max_tokens": 200, "seed": 4}
        person = client.chat.completions.create(response_model=Person, **asked)
        assert isinstance(person, Person)
        *_, last = client.chat.completions.create_partial(response_model=Person, **asked)
        assert Person.model_validate(last.model_dump())
        print("instructor", mode.name, person)

    asked = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "messages": PROMPT}
    asked |= {"max_tokens": 200, "num_retries": 0, "seed": 4}
    called = {**asked, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**called)
    chunks = list(litellm.completion(**called, stream=True))
    joined = litellm.stream_chunk_builder(chunks)
    for answer in (whole, joined):
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls", choice
        [call] = choice.message.tool_calls
        Person.model_validate_json(call.function.arguments)
    calls = [each.choices[0].message.tool_calls[0].function for each in (whole, joined)]
    assert calls[0].arguments == calls[1].arguments
    answer = litellm.completion(**asked, response_format=Person)
    Person.model_validate_json(answer.choices[0].message.content)
    print("litellm", calls[0].arguments)


if __name__ == "__main__":
    main()
