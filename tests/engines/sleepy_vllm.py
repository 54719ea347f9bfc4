"""vLLM's server on the CPU with sleep mode: its API and its scheduler sleep as on a GPU; only no memory is moved.

vLLM refuses ``--enable-sleep-mode`` on a platform that cannot move weights; its worker on the CPU leaves them there.
"""

import runpy

from vllm.platforms.cpu import CpuPlatform

CpuPlatform.is_sleep_mode_available = lambda _platform: True

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
