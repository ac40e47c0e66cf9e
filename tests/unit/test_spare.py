"""Spare ranks: what is handed to one, when it begins anew, and how it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from states import PATIENCE, until

from rft import config as configs
from rft.ground import device as devices
from rft.ground.errors import REFUSED
from rft.run import recovery, spare
from rft.run.recovery import RankWatch
from rft.run.spare import LoadedFiles, Spares

LONG = 5 * PATIENCE  # for imports that let everybody else have the cores
HANGS = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
TELLS = """
    import json, os, sys
    from pathlib import Path

    import psutil
    from rft.ground.errors import ConfigError

    told = {
        "rank": os.environ["RANK"],
        "at": os.getpid(),
        "has_imported": "megatron.core.optimizer" in sys.modules,
        "command": [word for word in psutil.Process().cmdline() if word],
        "nice": psutil.Process().nice(),
    }
    Path(os.environ["RFT_LOG_DIR"], "told.json").write_text(json.dumps(told))
    raise ConfigError("that was all")
"""


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config whose ranks load user code that tells of them, and refuse to go on."""
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "tells.py").write_text(textwrap.dedent(TELLS))
    config = configs.Config(name="a", device="cpu", plugin_dirs=[str(plugins)])
    config.model.model_path = str(tmp_path)
    config.checkpoint_root_dir = str(tmp_path)
    configs.save(config, tmp_path / "resolved.yaml")
    monkeypatch.setenv("RFT_LOG_DIR", str(tmp_path))
    return str(tmp_path / "resolved.yaml")


def one_of(spares: Spares, log_dir: Path) -> int:
    """The process of the first spare, which begins once ranks train."""
    spares.refill()
    (log_dir / "phase_rank_0").write_text("training")
    until(spares.pids, "a spare is there")
    return min(spares.pids())


def became(spares: Spares, path: str, log_dir: Path) -> dict[str, Any]:
    """What the rank tells that a spare was made."""
    command = [sys.executable, "-m", "rft.run.rank", path]
    process = spares.take(command, os.environ | {"RANK": "3"})
    assert process is not None and process.wait(LONG) == REFUSED
    assert json.loads((log_dir / "failure_rank_3.json").read_text())["part"] == "trainer rank 3"
    return json.loads((log_dir / "told.json").read_text())


def test_a_spare_becomes_the_rank_that_it_is_asked_to_be(resolved: str, tmp_path: Path) -> None:
    with Spares(resolved, tmp_path, 1) as spares:
        at = one_of(spares, tmp_path)
        assert became(spares, resolved, tmp_path) == {
            "rank": "3",
            "at": at,
            "has_imported": True,
            "command": [sys.executable, "-m", "rft.run.rank", resolved],
            "nice": 0,
        }


def test_none_begins_before_the_ranks_train(resolved: str, tmp_path: Path) -> None:
    with Spares(resolved, tmp_path, 1) as spares:
        spares.refill()
        assert spares.take([], {}) is None
        (tmp_path / "phase_rank_0").write_text("training")
        until(spares.pids, "a spare is there")


def test_a_spare_of_another_environment_begins_anew(
    resolved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Spares(resolved, tmp_path, 1) as spares:
        at = one_of(spares, tmp_path)
        monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")  # libraries have read it by then
        told = became(spares, resolved, tmp_path)
    assert (told["at"], told["has_imported"], told["rank"]) == (at, False, "3")


def test_a_spare_has_what_the_driver_reads_before_it_asks_for_a_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a tensor-parallel rank on Hopper; what reads it does so once."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # taken away behind the test
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr(devices, "capability", lambda: 9)
    monkeypatch.setattr(devices, "yield_to_others", lambda: None)

    def asked(kind: str) -> None:
        raise ValueError(f"{kind} {os.environ['CUDA_DEVICE_MAX_CONNECTIONS']}")

    monkeypatch.setattr(devices, "choose", asked)
    config = configs.Config(name="a", device="cuda")
    config.trainer.megatron.tensor_model_parallel_size = 2
    with pytest.raises(ValueError, match="cuda 1"):
        spare.import_ahead(config)


def test_spares_end_with_their_launcher(resolved: str, tmp_path: Path) -> None:
    with Spares(resolved, tmp_path, 1) as spares:
        at = one_of(spares, tmp_path)
    assert not psutil.pid_exists(at)


def test_spares_end_with_a_launcher_that_is_killed(resolved: str, tmp_path: Path) -> None:
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from rft.run.spare import Spares

        with Spares({resolved!r}, Path({str(tmp_path)!r}), 1) as spares:
            spares.refill()
            while not spares.pids():
                pass
            print(*spares.pids(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    (tmp_path / "phase_rank_0").write_text("training")
    command = [sys.executable, "-c", textwrap.dedent(code)]
    launcher = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=PATIENCE)
    assert launcher.returncode == -signal.SIGKILL
    at = int(launcher.stdout)
    until(lambda: not lives(at), "its spare ends")


def lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_file_that_was_loaded_and_has_changed_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text("A = 1\n")
    loaded = LoadedFiles(str(path))
    loaded.look()
    assert not loaded.has_changed()
    path.write_text("A = 22\n")
    assert loaded.has_changed()


def test_a_spare_that_dies_is_no_rank_that_failed(tmp_path: Path) -> None:
    kept = subprocess.Popen([sys.executable, "-c", HANGS])
    with RankWatch(tmp_path, 2, peers_s=0.0, killed_s=0.0, apart=lambda: {kept.pid}):
        rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        kept.kill()
        kept.wait()
        rank.communicate(b"\n", PATIENCE)
        assert rank.returncode == 0
    assert not (tmp_path / recovery.RECORD).exists()


def test_a_spare_that_was_taken_is_a_rank(tmp_path: Path) -> None:
    taken = subprocess.Popen([sys.executable, "-c", HANGS])
    apart = {taken.pid}
    with RankWatch(tmp_path, 2, peers_s=0.0, killed_s=0.0, apart=lambda: apart):
        apart.clear()
        peer = subprocess.Popen([sys.executable, "-c", HANGS])
        taken.kill()
        assert peer.wait(PATIENCE) == -signal.SIGKILL
    assert (tmp_path / recovery.RECORD).exists()


def test_a_title_longer_than_the_command_line_is_cut(tmp_path: Path) -> None:
    code = f"from {spare.__name__} import be_shown_as as b; b(['short', 'x' * 5000]); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        until(lambda: psutil.Process(process.pid).cmdline()[:1] == ["short"], "it has its title")
        assert set("".join(psutil.Process(process.pid).cmdline()[1:])) == {"x"}
        process.communicate(b"\n", PATIENCE)
