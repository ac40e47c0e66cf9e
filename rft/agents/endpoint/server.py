"""The engines behind OpenAI's API: HTTP requests in, answers out, and every answer of the policy
recorded with its session.

    POST /v1/chat/completions, /v1/completions     GET /v1/models, /health, /metrics
            POST /feedback, /commit
    the same below /s/<session>, for clients that can only change base_url, and /m/<model>, for
    those that cannot name one

The session of a request is that of its key, of its path or of the header X-Session-Id; without any,
one of its own, named in the reply's header. A model that is not one of `explorer.auxiliary_models`
is the policy, whatever it is called: clients change their base_url and nothing else. Invariants:
without a key nothing is answered but /health; an agent's key posts a reward only where its
workflow lets it; an answer that a client gave up waiting for is neither finished nor recorded, what
it rewarded is stored all the same; an answer is recorded before it is sent; who connects and says
nothing is cut (`connections`).
"""

import asyncio
import json
import logging
import os
import re
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rft.agents.endpoint import chat_format, replies
from rft.agents.endpoint.chat_format import ApiError, Asked
from rft.agents.endpoint.connections import ConnectionGate
from rft.agents.endpoint.registry import OpenedSession, Registry
from rft.agents.endpoint.replies import SampledChoice
from rft.agents.endpoint.served_models import Model
from rft.agents.endpoint.sessions import Continuation, Feedback
from rft.data.chat import text_of
from rft.ground.experience import LARGEST_REWARD, Completion, Sampling, encode, is_reward
from rft.rollout.answers import RunAnswers
from rft.rollout.context import Access, AgentSession

log = logging.getLogger(__name__)
# what comes that is no request is answered with 400; a stack for each would fill a disk with them
STRANGE_REQUESTS = logging.getLogger(f"{__name__}.strange")
STRANGE_REQUESTS.setLevel(logging.CRITICAL)
KEEP_ALIVE_S = 10.0  # between comments in a stream whose answer is not there yet
LARGEST_BODY = 64 * 2**20
BODY_S = 60.0  # from a request's header to the last byte behind it
# At the end of the run, for requests under way: aiohttp waits so long twice, before it takes away
# what they read and before it cancels them; then as long for groups that are being stored. The
# explorer has a third of shutdown_grace_s in all.
END_S = 1.0
ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character, as JSON writes it
SESSION = web.RequestKey("session", object)  # its name; None: any
KEY = web.RequestKey("key", str)
SCOPES = ("", "/s/{session}", "/m/{model}", "/s/{session}/m/{model}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenAIEndpoint:
    """`models[0]` is the policy."""

    def __init__(self, registry: Registry, models: list[Model], file: Path):
        self.registry = registry
        self.file = file  # where its address and key are written
        self.policy = models[0]
        self.others = {model.name: model for model in models[1:]}
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._gate: ConnectionGate | None = None
        self._expiring: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the address, without /v1. Port 0: any free one."""
        app = web.Application(middlewares=[self._guarded], client_max_size=LARGEST_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        for scope in SCOPES:
            app.router.add_post(f"{scope}/v1/chat/completions", self._completions)
            app.router.add_post(f"{scope}/v1/completions", self._completions)
            app.router.add_get(f"{scope}/v1/models", self._models)
            app.router.add_get(f"{scope}/v1/models/{{named:.+}}", self._described)
            for prefix in (scope, f"{scope}/v1"):
                app.router.add_post(f"{prefix}/feedback", self._feedback)
                app.router.add_post(f"{prefix}/commit", self._commit)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=END_S,
            access_log=None,
            logger=STRANGE_REQUESTS,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._gate = ConnectionGate(self._runner.server)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._gate, host, port)
        bound = self._listening.sockets[0].getsockname()
        self.url = f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
        write_key(self.file, f"{self.url}/v1", self.registry.token)
        if self.registry.store is not None:
            self._expiring = asyncio.create_task(self.registry.expire())
        return self.url

    async def close(self) -> None:
        """No one is let in any more; who has no answer within twice `END_S` gets none."""
        if self._expiring is not None:
            self._expiring.cancel()
        if self._listening is not None:
            self.file.unlink(missing_ok=True)
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.registry.end(END_S)

    def open_session(
        self, sampling: Sampling, may_reward: bool = False, answers: RunAnswers | None = None
    ) -> AgentSession:
        """A session for one run of an agent, with a key that opens it alone. `may_reward`: that key
        also posts its reward; the run's own always does. `answers`: to whom the policy's are told
        before the agent hears them, and who knows those of before a restart.
        """
        session = self.registry.open(sampling=sampling, may_reward=may_reward, answers=answers)
        access = Access(self.base_url(session.id), self.registry.key(session.id))
        return AgentSession(session, access, self.registry.open_[session.id].rewarded)

    def close_session(self, session: str) -> None:
        self.registry.close(session)

    def stats(self) -> dict[str, float]:
        return self.registry.stats()

    def base_url(self, session: str, model: str = "") -> str:
        """For a client that is to belong to this session."""
        return f"{self.url}/s/{session}{f'/m/{model}' if model else ''}/v1"

    # --- requests ---------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who asks, and OpenAI's form for everything that goes wrong."""
        assert self._gate is not None
        with self._gate.answering(request.transport) as known:
            return await self._answered(request, handler, known)

    async def _answered(
        self, request: web.Request, handler: Handler, known: Callable[[], None]
    ) -> web.StreamResponse:
        try:
            if request.path != "/health":
                named = request.match_info.get("session") or request.headers.get("X-Session-Id")
                key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
                request[SESSION], request[KEY] = self.registry.admit(key, named), key
                known()
            return await handler(request)
        except Exception as error:
            refused = self._refusal(request, error)
            return web.json_response(replies.error(refused), status=refused.status)

    def _refusal(self, request: web.Request, error: Exception) -> ApiError:
        """What a client is told."""
        if isinstance(error, ApiError):
            self.registry.counts["refused"] += 1
            return error
        what = f"{request.method} {request.path}"
        if isinstance(error, web.HTTPException):
            return ApiError(f"{what}: {error.reason}", status=error.status)
        log.error("%s", what, exc_info=error)
        told = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return ApiError(told, status=500)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        name = request.match_info.get("model") or str(body.get("model", ""))
        found = self.registry.enter(request[SESSION], unrecorded=name in self.others)
        try:
            asked = chat_format.read(body, found.session.sampling)
            if (asked.messages is None) == request.path.endswith("/chat/completions"):
                raise ApiError(
                    "messages belong to /v1/chat/completions, a prompt to /v1/completions",
                    "messages",
                )
            model = self._model(name)
            place, prompt = self._prompt(model, asked, found)
            known = found.answers if model is self.policy else None
            number = uuid.uuid4().hex if known is None else known.id(prompt)
            id = f"{'cmpl' if asked.messages is None else 'chatcmpl'}-{number}"
            answering = self._answer(model, asked, found, place, prompt, id)
            headers = {"X-Session-Id": found.session.id}
            if asked.stream:
                return await self._stream(request, asked, answering, len(prompt), id, headers)
            answer = replies.reply(id, asked, await answering, len(prompt))
            return web.json_response(replies.wire(answer), headers=headers)
        finally:
            self.registry.leave(found)

    def _model(self, name: str) -> Model:
        return self.others.get(name, self.policy)

    def _prompt(
        self, model: Model, asked: Asked, found: OpenedSession
    ) -> tuple[Continuation | None, list[int]]:
        """Where the conversation goes on, and the ids to go on from."""
        self.registry.counts["requests"] += 1
        session, place = found.session, None
        if model is self.policy and asked.messages is not None:
            place = session.find(asked)
        prompt = model.prompt(asked, place)
        if model is self.policy and asked.messages is None:
            place = session.find_ids(prompt)
        if place is not None and prompt[: len(place.tokens)] != place.tokens:
            place = None  # the template writes something else behind an answer: rendered anew
        try:
            model.check_room(prompt)
        except ApiError:
            session.too_long = prompt if model is self.policy else session.too_long
            raise
        return place, prompt

    async def _answer(
        self,
        model: Model,
        asked: Asked,
        found: OpenedSession,
        place: Continuation | None,
        prompt: list[int],
        id: str,
    ) -> list[SampledChoice]:
        sampling = asked.sampling
        if sampling.seed is not None:  # of the session: every call of it another one
            before = len(found.session.calls) + found.under_way - 1
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + before)
        made = await model.answer(
            *(f"{found.session.id}/{id}", prompt, sampling, asked.n, tuple(asked.stop)),
            answers=found.answers if model is self.policy else None,
        )
        if any(one.stop == "abort" for one in made):
            raise ApiError("the engine was told to give this answer up; ask again", status=503)
        return [
            self._choice(model, asked, found, place, prompt, one, f"{id}-{n}" if n else id)
            for n, one in enumerate(made)
        ]

    def _choice(
        self,
        model: Model,
        asked: Asked,
        found: OpenedSession,
        place: Continuation | None,
        prompt: list[int],
        made: Completion,
        id: str,
    ) -> SampledChoice:
        text = chat_format.cut(model.text(made.ids), asked.stop)
        parsed = model.parsed(made.ids, asked)
        message = chat_format.answer_message(text, bool(asked.tools), id, parsed)
        if model is self.policy:
            session, before = found.session, found.session.branches
            answer = chat_format.remembered(message) if asked.messages is not None else None
            session.record(asked, place, prompt, made, text, id=id, answer=answer)
            self.registry.counts.update(
                answers=1, tokens=len(made.tokens), branches=session.branches - before
            )
        tokens = [model.tokenizer.decode([one]) for one in made.ids] if asked.logprobs else []
        return SampledChoice(made, message, text, tokens)

    async def _stream(
        self,
        request: web.Request,
        asked: Asked,
        answering: Any,
        prompt_tokens: int,
        id: str,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        """Events of the answer once it is whole; until then comments, which keep the connection."""
        response = web.StreamResponse(
            headers={**headers, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        task = asyncio.ensure_future(answering)
        try:
            while not (await asyncio.wait([task], timeout=KEEP_ALIVE_S))[0]:
                await response.write(b": still sampling\n\n")
            for chunk in replies.chunks(id, asked, task.result(), prompt_tokens):
                await response.write(f"data: {json.dumps(replies.wire(chunk))}\n\n".encode())
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # the status is sent: the stream says it
            told = replies.error(self._refusal(request, error))
            await response.write(f"data: {json.dumps(told)}\n\n".encode())
        finally:
            task.cancel()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    # --- rewards ----------------------------------------------------------------------------------

    async def _feedback(self, request: web.Request) -> web.Response:
        body = await _json(request)
        session = request[SESSION] or body.get("session")
        if request[SESSION] is not None and body.get("session") not in (None, session):
            raise ApiError(
                "the body names another session than the key, path or header", "session", status=403
            )
        if not isinstance(session, str):
            raise ApiError("say which session the reward is for", "session")
        self.registry.check_may_reward(request[KEY], session)
        feedback = Feedback(
            reward=_one(body, "reward"),
            turns=_numbers(body, "turn_rewards"),
            tokens=_numbers(body, "token_rewards"),
            metrics={
                str(name): _finite(value, "metrics")
                for name, value in _object(body, "metrics").items()
            },
            info=_object(body, "info"),
        )
        try:
            encode(feedback.info)
        except (OverflowError, RecursionError) as error:
            raise ApiError(f"info cannot be stored: {error}", "info") from error
        if not feedback:
            raise ApiError("give reward, turn_rewards or token_rewards", "reward")
        task = body.get("task")
        made, stored = await self.registry.feedback(
            session, feedback, None if task is None else str(task)
        )
        return web.json_response({"session": session, "experiences": made, "stored": stored})

    async def _commit(self, request: web.Request) -> web.Response:
        body = await _json(request) if request.can_read_body else {}
        if request[SESSION] is not None and self.registry.store is None:
            raise ApiError(
                "the workflow that opened this session takes its experiences", status=409
            )
        tasks = body.get("tasks")
        if tasks is not None and not isinstance(tasks, list):
            raise ApiError("tasks is a list of names", "tasks")
        return web.json_response(
            {"groups": await self.registry.commit(None if tasks is None else list(map(str, tasks)))}
        )

    # --- about ------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        rows = [self.policy, *self.others.values()]
        listed = [replies.wire(replies.listed(m.name, m.max_model_len)) for m in rows]
        return web.json_response({"object": "list", "data": listed})

    async def _described(self, request: web.Request) -> web.Response:
        name = request.match_info["named"]
        return web.json_response(
            replies.wire(replies.listed(name, self._model(name).max_model_len))
        )

    async def _health(self, _: web.Request) -> web.Response:
        absence = self.policy.pool.absence()
        return web.json_response(
            {"status": "unavailable" if absence else "ok", "cause": absence},
            status=503 if absence else 200,
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        """In Prometheus' text form."""
        found = {**self.registry.stats(), **self.policy.pool.stats()}
        lines = [f"rft_{name.replace('/', '_')} {value:g}" for name, value in found.items()]
        return web.Response(text="\n".join(lines) + "\n")


def write_key(path: Path, base_url: str, key: str) -> None:
    """For the owner of the run alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"base_url": base_url, "api_key": key}, file)


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_S):
            data = await request.text()
    # too slow; of no charset; not of that charset; not of the form that its header says
    except (TimeoutError, LookupError, ValueError, web.RequestPayloadError) as error:
        status = 408 if isinstance(error, TimeoutError) else 400
        raise ApiError(f"the body could not be read: {error!r}", status=status) from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ApiError("the body is no JSON object")
    # models write such halves of characters in JSON, and agents send them back: no text has them
    made: dict[str, Any] = _with_texts(found) if ESCAPED.search(data) else found
    return made


def _with_texts(value: Any) -> Any:
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, list):
        return [_with_texts(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {_with_texts(key): _with_texts(one) for key, one in value.items()}


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    found = body.get(name) or {}
    if not isinstance(found, dict):
        raise ApiError(f"{name} is an object", name)
    return found


def _one(body: dict[str, Any], name: str) -> float | None:
    return None if body.get(name) is None else _reward(body[name], name)


def _numbers(body: dict[str, Any], name: str) -> list[float]:
    found = body.get(name) or []
    if not isinstance(found, list):
        raise ApiError(f"{name} is a list of numbers", name)
    return [_reward(one, name) for one in found]


def _reward(value: Any, name: str) -> float:
    found = _finite(value, name)
    if not is_reward(found):
        raise ApiError(
            f"{name} has {value!r}: {LARGEST_REWARD:g} is the largest that is taken", name
        )
    return found


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool | int | float) and -1e308 <= value <= 1e308:
        return float(value)
    raise ApiError(f"{name} has {value!r}: give finite numbers", name)
