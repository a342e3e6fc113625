"""openai-python against the server: what no test with whole processes shows of it."""

from __future__ import annotations

from dataclasses import replace

import pydantic
import pytest

from pdserve.text.answer.parsers import TOOL_PARSERS
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.chat import ChatTemplate
from tests.server.conftest import make_engine, scripted, serving

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client_of(openai):
    def client(server):
        return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)

    return client


class See(pydantic.BaseModel):
    """Look at something."""

    x: int
    what: str = "fox"


SEEN = '<tool_call>\n{"name": "See", "arguments": {"x": 1, "what": "dog"}}\n</tool_call>'


async def test_calls_of_the_clients_own_tools(text, client_of, openai):
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}", {})
    style = AnswerStyle(calls=TOOL_PARSERS["hermes"])
    calling = replace(text, answers=style, chat_template=template)
    tools = [openai.pydantic_function_tool(See)]
    async with (
        serving(calling, scripted(calling, "Look: " + SEEN), api_keys=("key",)) as server,
        client_of(server) as client,
    ):
        whole = await client.chat.completions.parse(model="tiny", messages=MESSAGES, tools=tools)
        async with client.chat.completions.stream(
            model="tiny", messages=MESSAGES, tools=tools
        ) as stream:
            streamed = await stream.get_final_completion()
        [call] = whole.choices[0].message.tool_calls
        answer = {"role": "tool", "tool_call_id": call.id, "content": "a dog"}
        said = whole.choices[0].message.to_dict(exclude_none=True)
        await client.chat.completions.create(model="tiny", messages=[*MESSAGES, said, answer])
    for completion in (whole, streamed):
        [choice] = completion.choices
        assert (choice.message.content, choice.finish_reason) == ("Look:", "tool_calls")
        assert choice.message.tool_calls[0].function.parsed_arguments == See(x=1, what="dog")


async def test_errors_are_the_clients_own_classes(text, client_of, openai):
    engine = make_engine(text, max_waiting=0)
    async with serving(text, engine, api_keys=("key",)) as server, client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="x", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="no").completions.create(model="tiny", prompt="x")
        engine.die("gone")
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="tiny", prompt="x")


async def test_an_error_in_mid_stream_is_raised(text, client_of, openai):
    async with (
        serving(text, make_engine(text, die_after=3)) as server,
        client_of(server) as client,
    ):
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
