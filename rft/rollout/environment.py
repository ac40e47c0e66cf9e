"""Environment variables of an engine's processes, to be set before vLLM is imported."""

from rft.ground.device import thread_environment

# what vLLM must not do: phone home, talk on the user's terminal, resolve this machine's public
# address
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",  # an engine's workers are on one machine
    "TOKENIZERS_PARALLELISM": "false",
}


def environment(device_kind: str, threads: int, workers: int) -> dict[str, str]:
    """On CPU: our thread budget instead of vLLM's core binding, and one
    process less when there is one worker.
    """
    if device_kind != "cpu":
        return QUIET
    return {
        **QUIET,
        **thread_environment(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # 0: EngineCore runs the worker itself
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if workers == 1 else "1",
        # the sampler's one compiled function costs 17 s of C++ compiler at the first request
        "TORCH_COMPILE_DISABLE": "1",
    }
