"""Programs that tests start: engines that fail on demand, holders of engines, an MCP server."""

from pathlib import Path

PROGRAMS = Path(__file__).parent
