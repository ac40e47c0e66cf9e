"""A service in miniature that speaks Tinker's API: what the public client asks for in a run, on a
toy model that really learns.

    python tests/unit/tinker_service.py MODEL_DIR [PORT]       (its name there: "toy")

In: HTTP requests of the public `tinker` client. Out: futures that the client retrieves. The service
itself cannot be had in a test, so this one stands for it; the client is the real one. Requests of a
model are done in the order of their `seq_id`, in whatever order they arrive, as the service does
them. Weights are those of adapters (LoRA) on a frozen Hugging Face model.
"""

import contextlib
import copy
import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as wire
from torch import Tensor, nn

BASE = "toy"
KEY = "tml-key-of-nobody"
POLL_S = 2.0  # that a client waits for a future at a time
CHUNK = 3  # datums of one request: small, so that a step is several
PARTS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
}
SCALE = 32.0  # an adapter is scaled by this / rank
DTYPES = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64}


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator):
        super().__init__()
        self.base, self.scale = base, SCALE / rank
        self.a = nn.Parameter(
            torch.randn(rank, base.in_features, generator=generator) / base.in_features**0.5
        )
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T * self.scale


def adapted(base: nn.Module, lora: dict[str, Any]) -> nn.Module:
    """A copy of the frozen model with new adapters."""
    model, generator = (
        copy.deepcopy(base).requires_grad_(False),
        torch.Generator().manual_seed(lora["seed"] or 0),
    )
    names = [name for key, parts in PARTS.items() if lora[key] for name in parts]
    names += ["lm_head"] if lora["train_unembed"] else []
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in names and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), name, Adapted(module, lora["rank"], generator))
    return model


def adapter(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach().clone()
        for name, value in model.named_parameters()
        if name.endswith((".a", ".b"))
    }


def logprobs_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    found = model(ids[None]).logits[0].log_softmax(-1)
    return found.gather(-1, targets[:, None])[:, 0]


class Trainee:
    """One training run. `park`: requests that came before their turn."""

    def __init__(self, base: nn.Module, lora: dict[str, Any]):
        self.lora = lora
        self.model = adapted(base, lora)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.updates = 0
        self.turn = 1
        self.park: dict[int, Callable[[], None]] = {}
        self.lock = threading.RLock()

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "lora": self.lora,
                "adapter": adapter(self.model),
                "optimizer": self.optimizer.state_dict(),
                "updates": self.updates,
            }
        )

    def take(self, saved: dict[str, Any], optimizer: bool) -> None:
        self.model.load_state_dict(saved["adapter"], strict=False)
        self.updates = saved["updates"]
        if optimizer:
            self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))

    def in_turn(self, number: int, work: Callable[[], None]) -> None:
        with self.lock:
            self.park[number] = work
            while (ready := self.park.pop(self.turn, None)) is not None:
                self.turn += 1
                ready()


class Service:
    """`calls`: what was asked for, in order.

    `failing`: words to refuse the next request of a kind with.
    """

    def __init__(self, model_dir: str):
        import transformers

        self.base = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32
        ).eval()
        self.calls: list[str] = []
        self.failing: dict[str, str] = {}
        self.trainees: dict[str, Trainee] = {}
        self.saved: dict[str, dict[str, Any]] = {}  # by path
        self.samplers: dict[str, nn.Module] = {}  # by session
        self.before_update: Callable[[Trainee], None] = lambda trainee: None
        self._futures: dict[str, tuple[str, bytes]] = {}  # content type and body
        self._done = threading.Condition()
        self._numbers = itertools.count()

    # --- futures ----------------------------------------------------------------------------------

    def promise(
        self,
        kind: str,
        work: Callable[[], Any],
        trainee: Trainee | None = None,
        seq: int | None = None,
    ) -> dict[str, Any]:
        """Do it in its turn; the client asks for the outcome later."""
        identity = f"{kind}-{next(self._numbers)}"

        def do() -> None:
            self.calls.append(kind)
            try:
                if kind in self.failing:
                    raise ValueError(self.failing.pop(kind))
                outcome = work()
                found = (
                    ("application/x-protobuf", outcome)
                    if isinstance(outcome, bytes)
                    else as_json(outcome)
                )
            except Exception as error:
                found = as_json({"error": f"{type(error).__name__}: {error}", "category": "user"})
            with self._done:
                self._futures[identity] = found
                self._done.notify_all()

        if trainee is not None and seq is not None:
            trainee.in_turn(seq, do)
        else:
            do()
        return {"request_id": identity}

    def retrieve(self, asked: dict[str, Any]) -> tuple[str, bytes]:
        identity = asked["request_id"]
        with self._done:
            if not self._done.wait_for(lambda: identity in self._futures, POLL_S):
                return as_json(
                    {"type": "try_again", "request_id": identity, "queue_state": "active"}
                )
            return self._futures[identity]

    def await_deletions(self, count: int) -> None:
        """Until so many deletions have been asked for."""
        with self._done:
            assert self._done.wait_for(lambda: self.calls.count("delete") >= count, 30)

    # --- training ---------------------------------------------------------------------------------

    def create_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            if asked["base_model"] != BASE:
                raise ValueError(f"there is no model {asked['base_model']}")
            identity = f"{asked['session_id']}:train:{asked['model_seq_id']}"
            self.trainees[identity] = Trainee(self.base, {"seed": None, **asked["lora_config"]})
            return {"type": "create_model", "model_id": identity}

        return self.promise("create_model", work)

    def load_weights(self, asked: dict[str, Any]) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            saved = self.saved[asked["path"]]
            identity = f"{asked['session_id']}:train:{asked['model_seq_id']}"
            trainee = self.trainees[identity] = Trainee(self.base, saved["lora"])
            trainee.take(saved, asked["optimizer"])
            return {"type": "load_weights", "path": asked["path"], "model_id": identity}

        return self.promise("load_weights", work)

    def get_info(self, asked: dict[str, Any]) -> dict[str, Any]:
        rank = self.trainees[asked["model_id"]].lora["rank"]
        return {
            "type": "get_info",
            "model_data": {"arch": "toy", "model_name": BASE},
            "model_id": asked["model_id"],
            "is_lora": True,
            "lora_rank": rank,
            "model_name": BASE,
        }

    def forward_backward(self, asked: wire.ForwardBackwardRequest) -> dict[str, Any]:
        trainee = self.trainees[asked.model_id]
        kind = "forward" if asked.forward_only else "forward_backward"
        return self.promise(kind, lambda: self._passes(trainee, asked), trainee, asked.seq_id)

    def _passes(self, trainee: Trainee, asked: wire.ForwardBackwardRequest) -> bytes:
        if asked.loss_fn != "cross_entropy":
            raise ValueError(f"no loss {asked.loss_fn}")
        total, found = torch.zeros(()), []
        with torch.set_grad_enabled(not asked.forward_only):
            for datum in asked.data:
                ids = np.concatenate(
                    [
                        np.frombuffer(c.encoded_text.tokens, dtype=np.int32)
                        for c in datum.model_input
                    ]
                )
                inputs = {name: tensor_of(value) for name, value in datum.loss_fn_inputs.items()}
                logprobs = logprobs_of(
                    trainee.model, torch.from_numpy(ids.astype(np.int64)), inputs["target_tokens"]
                )
                total = total - (logprobs * inputs["weights"]).sum()
                found.append(logprobs.detach().numpy())
        if not asked.forward_only:
            total.backward()
        told = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        told.metrics["loss:sum"] = float(total.detach())
        record = told.loss_fn_outputs.add()
        record.num_datums = len(found)
        record.fields["logprobs"].dtype = wire.DTYPE_FLOAT32
        record.fields["logprobs"].data = np.concatenate(found).astype(np.float32).tobytes()
        record.fields["logprobs"].offsets = (
            (4 * np.cumsum([0, *map(len, found)])).astype(np.int64).tobytes()
        )
        return told.SerializeToString()

    def optim_step(self, asked: dict[str, Any]) -> dict[str, Any]:
        trainee, params = self.trainees[asked["model_id"]], asked["adam_params"]

        def work() -> dict[str, Any]:
            self.before_update(trainee)
            weights = [p for p in trainee.model.parameters() if p.requires_grad]
            norm = nn.utils.clip_grad_norm_(weights, params["grad_clip_norm"] or torch.inf)
            for group in trainee.optimizer.param_groups:
                group |= {
                    "lr": params["learning_rate"],
                    "betas": (params["beta1"], params["beta2"]),
                    "eps": params["eps"],
                    "weight_decay": params["weight_decay"],
                }
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
            trainee.updates += 1
            return {"metrics": {"unclipped_grad_l2:mean": float(norm)}}

        return self.promise("optim_step", work, trainee, asked["seq_id"])

    def save(self, kind: str, segment: str, asked: dict[str, Any]) -> dict[str, Any]:
        trainee, path = (
            self.trainees[asked["model_id"]],
            f"tinker://{asked['model_id']}/{segment}/{asked['path']}",
        )

        def work() -> dict[str, Any]:
            if path in self.saved:
                raise ValueError(f"{path} is there already")
            self.saved[path] = trainee.state()
            return {"type": kind, "path": path}

        return self.promise(kind, work, trainee, asked["seq_id"])

    # --- sampling ---------------------------------------------------------------------------------

    def create_sampling_session(self, asked: dict[str, Any]) -> dict[str, Any]:
        identity = f"{asked['session_id']}:sample:{asked['sampling_session_seq_id']}"
        if (path := asked.get("model_path")) is not None:
            saved = self.saved[path]
            model = adapted(self.base, saved["lora"])
            model.load_state_dict(saved["adapter"], strict=False)
        else:
            model = self.base
        self.samplers[identity] = model.eval()
        return {"type": "create_sampling_session", "sampling_session_id": identity}

    def get_sampler(self, identity: str) -> dict[str, Any]:
        return {"sampler_id": identity, "base_model": BASE}

    def asample(self, asked: dict[str, Any]) -> dict[str, Any]:
        model, count = self.samplers[asked["sampling_session_id"]], asked["num_samples"]
        promised = self.promise("asample", lambda: sampled(model, asked))
        return promised | {
            "sample_sequence_ids": [f"{promised['request_id']}/{i}" for i in range(count)]
        }

    # --- over HTTP --------------------------------------------------------------------------------

    def answer(self, path: str, body: bytes) -> tuple[str, bytes]:
        if path == "forward_backward":
            return as_json(self.forward_backward(wire.ForwardBackwardRequest.FromString(body)))
        asked = json.loads(body) if body else {}
        if path == "retrieve_future":
            return self.retrieve(asked)
        if found := re.fullmatch(r"samplers/(.+)", path):
            return as_json(self.get_sampler(found[1]))
        if found := re.fullmatch(r"training_runs/(.+?)/checkpoints/(.+)", path):
            with self._done:
                del self.saved[f"tinker://{found[1]}/{found[2]}"]
                self.calls.append("delete")
                self._done.notify_all()
            return as_json({})
        if path.startswith("sessions/"):
            return as_json({})
        simple: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "client/config": lambda asked: {"fwdbwd_max_chunk_len": CHUNK},
            "client/dynamic_config": lambda asked: {},
            "get_server_capabilities": lambda asked: {"supported_models": [{"model_name": BASE}]},
            "create_session": lambda asked: {"session_id": f"session-{next(self._numbers)}"},
            "session_heartbeat": lambda asked: {},
            "telemetry": lambda asked: {"status": "accepted"},
            "create_model": self.create_model,
            "load_weights": self.load_weights,
            "get_info": self.get_info,
            "optim_step": self.optim_step,
            "asample": self.asample,
            "create_sampling_session": self.create_sampling_session,
            "save_weights": lambda asked: self.save("save_weights", "weights", asked),
            "save_weights_for_sampler": lambda asked: self.save(
                "save_weights_for_sampler", "sampler_weights", asked
            ),
        }
        return as_json(simple[path](asked))


def sampled(model: nn.Module, asked: dict[str, Any]) -> bytes:
    """A `SampleResponse`: what was sampled, and log-probabilities of
    the prompt where they are asked for.
    """
    params, prompt = (
        asked["sampling_params"],
        [t for chunk in asked["prompt"]["chunks"] for t in chunk["tokens"]],
    )
    told = wire.SampleResponse()
    with torch.no_grad():
        if asked.get("prompt_logprobs"):
            ids = torch.tensor(prompt)
            known = logprobs_of(model, ids[:-1], ids[1:]).numpy()
            told.prompt_logprobs = np.concatenate([[np.nan], known]).astype(np.float32).tobytes()
        for number in range(asked["num_samples"]):
            seed = params.get("seed")
            generator = torch.Generator()
            generator.seed() if seed is None else generator.manual_seed(seed + number)
            made = told.sequences.add()
            tokens, logprobs, stopped = one_response(model, prompt, params, generator)
            made.tokens = np.array(tokens, dtype=np.int32).tobytes()
            made.logprobs = np.array(logprobs, dtype=np.float32).tobytes()
            made.stop_reason = wire.STOP_REASON_STOP if stopped else wire.STOP_REASON_LENGTH
    return told.SerializeToString()


def one_response(
    model: nn.Module, prompt: list[int], params: dict[str, Any], generator: torch.Generator
) -> tuple[list[int], list[float], bool]:
    tokens: list[int] = []
    logprobs: list[float] = []
    temperature = params.get("temperature", 1.0)
    while len(tokens) < params["max_tokens"]:
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        found = (logits / (temperature or 1.0)).log_softmax(-1)
        token = (
            int(torch.multinomial(found.exp(), 1, generator=generator))
            if temperature
            else int(found.argmax())
        )
        tokens.append(token)
        logprobs.append(float(found[token]))
        if token in params.get("stop", []):
            return tokens, logprobs, True
    return tokens, logprobs, False


def tensor_of(value: wire.Tensor) -> Tensor:
    return torch.from_numpy(np.frombuffer(value.dense, dtype=DTYPES[value.dtype]).copy())


def as_json(found: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(found).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def do_POST(self) -> None:
        self._answer()

    do_GET = do_DELETE = do_POST

    def _answer(self) -> None:
        body = self._body()
        try:
            if self.headers.get("X-API-Key") != KEY:
                return self._send(401, *as_json({"detail": "no such key"}))
            found = self.service.answer(self.path.split("?")[0].removeprefix("/api/v1/"), body)
            return self._send(200, *found)
        except KeyError as error:
            return self._send(404, *as_json({"detail": f"there is no {error}"}))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients are killed in these tests
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving(model_dir: str, port: int = 0) -> Iterator[tuple[Service, str]]:
    """The service and its address, until the block is left.

    What it computes is too small for more than one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    service = Service(model_dir)
    server = Server(("127.0.0.1", port), type("Bound", (Handler,), {"service": service}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield service, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    with serving(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0) as (_, where):
        print(f"export TINKER_BASE_URL={where} TINKER_API_KEY={KEY}", flush=True)
        while True:
            time.sleep(3600)
