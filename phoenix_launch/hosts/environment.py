"""Which environment variables the workers of a node get from where the job was started; `TRANSFERRED` lists them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from phoenix_launch.errors import UsageError

SECRETS: Final = frozenset({"PHOENIX_JOB_KEY"})

# Searched for what to load or where, or changing what is computed. A trailing * stands for any ending.
TRANSFERRED: Final = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
    "CC",
    "CXX",
    "PYTHON*",
    "VIRTUAL_ENV",
    "CONDA_*",
    "CUDA_*",
    "CUDNN_*",
    "CUBLAS_*",
    "CUBLASLT_*",
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_*",
    "RCCL_*",
    "GLOO_*",
    "UCX_*",
    "FI_*",
    "TORCH_*",
    "PYTORCH_*",
    "TORCHINDUCTOR_*",
    "TORCHDYNAMO_*",
    "TORCHELASTIC_*",
    "USE_LIBUV",
    "LOGLEVEL",
    "TRITON_*",
    "OMP_*",
    "GOMP_*",
    "KMP_*",
    "MKL_*",
    "OPENBLAS_*",
    "NUMEXPR_*",
    "HF_*",
    "TRANSFORMERS_*",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "PHOENIX_*",
)

# Of those, what is true of one machine only: its devices, and files of the launcher itself.
KEPT_HERE: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_LOG_DIRECTORY",
        "PHOENIX_HOME",
        "TORCHELASTIC_ERROR_FILE",
    }
)


def job_environment(environ: Mapping[str, str], options: Iterable[str], *, simulated: bool) -> dict[str, str]:
    """What the launcher's environment gives to the workers of a node.

    Simulated nodes inherit everything, as under torchrun. Real ones get what `TRANSFERRED` names, to be laid over what
    their own login session has (HOME, USER, XDG_* are theirs). `options` are those of --env, each NAME or NAME=VALUE;
    they hold for both. The job's key never leaves.
    """
    chosen = {name: value for name, value in environ.items() if simulated or is_transferred(name)}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or "\0" in option:
            raise UsageError(f"--env {option!r} has no name", hint="write --env NAME or --env NAME=VALUE")
        if name in SECRETS:
            raise UsageError(f"--env {name}: this key is never given to workers", hint="leave it out")
        if not equals and name not in environ:
            near = difflib.get_close_matches(name, list(environ), n=1)
            hint = f"did you mean {near[0]}?" if near else f"write --env {name}=VALUE, or export it first"
            raise UsageError(f"--env {name}: it is not set here", hint=hint)
        chosen[name] = value if equals else environ[name]
    return {name: value for name, value in chosen.items() if name not in SECRETS and is_text(name + value)}


def is_text(text: str) -> bool:
    """Whether it is UTF-8, as all that travels to a node has to be; the system lets names and values be any bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_transferred(name: str) -> bool:
    """Whether a variable of this name goes to other hosts by itself."""
    if name in KEPT_HERE or name in SECRETS:
        return False
    return any(name.startswith(row[:-1]) if row.endswith("*") else name == row for row in TRANSFERRED)
