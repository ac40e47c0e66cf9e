"""The service that trains and samples, through its public client: one session, and answers that are
waited for with a deadline.

In: the section `model.tinker`, and a key that only the client reads ($TINKER_API_KEY). Out: its
clients, and plain answers. Invariant: no wait here is without an end, and what the service refuses
is raised in its own words, in one line.
"""

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rft.config import ConfigError, TinkerConfig
from rft.ground.names import read_hf_config

log = logging.getLogger(__name__)
CLOSE_S = 10.0


class ServiceFailed(RuntimeError):
    """The service refused a request, or did not answer in time."""


class Service:
    """Connects at once: a wrong key, address or name of a model is an error of the start."""

    def __init__(self, config: TinkerConfig):
        import tinker

        self.config = config
        where = config.base_url or "the address of $TINKER_BASE_URL, or Tinker's own"
        try:
            self.rest = tinker.RestClient(base_url=config.base_url)
        except Exception as error:  # httpx's, pydantic's and the client's own
            raise ServiceFailed(
                f"no service that speaks Tinker's API at {where} (model.tinker.base_url): "
                f"{in_a_line(error)}"
            ) from error
        capabilities = self.answer(
            self.rest.get_server_capabilities(), "asking which models there are"
        )
        offered = [str(model.model_name) for model in capabilities.supported_models]
        if config.base_model not in offered:
            raise ConfigError(
                f"model.tinker.base_model={config.base_model}: the service has {', '.join(offered)}"
            )
        self.client = tinker.ServiceClient(base_url=config.base_url)

    def answer(self, future: Any, what: str) -> Any:
        """For whoever can do nothing else meanwhile."""
        try:
            return future.result(self.config.timeout)
        except TimeoutError as error:
            raise ServiceFailed(
                f"{what}: no answer in {self.config.timeout:g} s, which model.tinker.timeout allows"
            ) from error
        except Exception as error:  # of many classes, whose words say what is wrong
            raise ServiceFailed(f"{what}: {in_a_line(error)}") from error

    def delete(self, path: str) -> None:
        """Begin to delete saved weights.

        That some stay costs room and nothing else, so a failure is only written down.
        """

        def note(done: "Future[None]") -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                log.warning("%s was not deleted: %s", path, in_a_line(error))

        self.rest.delete_checkpoint_from_tinker_path(path).future().add_done_callback(note)

    def close(self) -> None:
        """End the session; the service would find out by itself, later."""
        try:
            self.client.close("success").result(CLOSE_S)
        except Exception as error:  # everything that counts has its answer already
            log.warning("the session was not closed: %s", in_a_line(error))


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def end_tokens(model_path: str) -> list[int]:
    """Ids that end a response, as the model's own files say."""
    declared = [read_hf_config(model_path).get("eos_token_id")]
    generation = Path(model_path) / "generation_config.json"
    if generation.exists():
        declared.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    return sorted(
        {
            token
            for ids in declared
            for token in (ids if isinstance(ids, list) else [ids])
            if token is not None
        }
    )
