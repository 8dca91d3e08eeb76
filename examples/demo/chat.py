# SPDX-License-Identifier: Apache-2.0
"""One greedy chat turn through the OpenAI client, streamed and timed."""

import asyncio
import time
from dataclasses import dataclass, field

import openai
from vllm_serve import MODEL_NAME, Server

REQUEST_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Request:
    """A chat turn: a question, after a document if there is one.

    Attributes:
        question: What to answer.
        kind: What the report calls this turn.
        document: Text in front of the question.
        max_tokens: Of the answer.
    """

    question: str
    kind: str
    document: str = ""
    max_tokens: int = 40

    @property
    def prompt(self) -> str:
        """The text to send."""
        return f"{self.document}\n\n{self.question}".lstrip()


@dataclass(slots=True)
class Reply:
    """What came back.

    Attributes:
        text: The answer.
        token_ids: Its tokens.
        num_prompt_tokens: Tokens of the prompt, chat template included.
        num_cached_tokens: Those of them whose KV was in the prefix cache.
        ttft_s: Seconds from sending the request to its first token.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_s: float = 0.0


def connect(server: Server) -> openai.AsyncOpenAI:
    """Return a client of the server; to be closed."""
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=REQUEST_TIMEOUT_S,
        # A proxy that the environment names has no business with this machine's own address.
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


async def ask(
    client: openai.AsyncOpenAI, request: Request, started: asyncio.Event | None = None
) -> Reply:
    """Send one request and collect its stream.

    Args:
        client: From ``connect``.
        request: What to ask.
        started: Set when the first token is there, or when there will be none.

    Raises:
        openai.APIError: The server refused the request or went away.
    """
    reply = Reply()
    start = time.monotonic()
    try:
        stream = await client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": request.prompt}],
            temperature=0,
            max_tokens=request.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        async for chunk in stream:
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                reply.num_prompt_tokens = chunk.usage.prompt_tokens
                reply.num_cached_tokens = (details and details.cached_tokens) or 0
            for choice in chunk.choices:
                # An addition of vLLM's; the client keeps fields that it does not know.
                token_ids = (choice.model_extra or {}).get("token_ids") or []
                if token_ids and not reply.token_ids:
                    reply.ttft_s = time.monotonic() - start
                    if started is not None:
                        started.set()
                reply.token_ids += token_ids
                reply.text += choice.delta.content or ""
    finally:
        if started is not None:
            started.set()
    return reply


async def ask_beside(
    client: openai.AsyncOpenAI, chats: list[Request], prompts: list[Request]
) -> list[Reply]:
    """Send the chats and, once each of them decodes, the prompts; return the replies in order."""
    started = [asyncio.Event() for _ in chats]
    tasks = [
        asyncio.create_task(ask(client, chat, event))
        for chat, event in zip(chats, started, strict=True)
    ]
    for event in started:
        await event.wait()
    return await asyncio.gather(*tasks, *(ask(client, prompt) for prompt in prompts))
