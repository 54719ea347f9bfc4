from pathlib import Path

import anyio
import pytest

from workers.engine.launch import adapted, command_for, starting_devices, takes_tools
from workers.engine.start_gate import StartGate
from workers.errors import InvalidSpec
from workers.spec import EngineKind, Flag, WorkerSpec


def spec(**changes: object) -> WorkerSpec:
    values: dict[str, object] = {"engine": EngineKind.VLLM, "model": "org/model", "name": "big", "slots": 8, **changes}
    return WorkerSpec(**values)  # type: ignore[arg-type]


class TestCommand:
    def test_settings_that_vllm_leaves_open_are_given(self) -> None:
        """The number of sequences, the context's length, prefix caching, and the report of cached prompt tokens."""
        command = command_for(spec(args={"attention-backend": "FLASH_ATTN"}, env={"A": "1"}), {"PATH": "/bin"})
        assert command.argv == (
            *("vllm", "serve", "org/model", "--served-model-name", "big", "--host", "127.0.0.1", "--port", "9100"),
            *("--max-num-seqs", "8", "--max-model-len", "4096", "--enable-prefix-caching"),
            *("--enable-prompt-tokens-details", "--worker-extension-cls", "roundhouse_weights.WeightReceiver"),
            *("--attention-backend", "FLASH_ATTN"),
        )
        assert {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PROCESS_NAME_PREFIX": "big-0",
            "A": "1",
        }.items() <= command.env.items()

    def test_the_module_takes_the_model_as_a_flag(self) -> None:
        """The command line of some builds does not start; their module does."""
        argv = command_for(spec(command=["python", "-m", "vllm.entrypoints.openai.api_server"]), {}).argv
        assert argv[:5] == ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model")

    def test_an_operators_setting_is_kept(self) -> None:
        """It may repeat a default of ours, or say the opposite; it may come from Roundhouse's environment."""
        argv = command_for(spec(args={"no_enable_prefix_caching": True}), {}).argv
        assert ("--enable-prefix-caching" in argv, argv.count("--no-enable-prefix-caching")) == (False, 1)
        assert command_for(spec(), {"VLLM_NO_USAGE_STATS": "0"}).env["VLLM_NO_USAGE_STATS"] == "0"

    def test_a_socket_replaces_a_port(self) -> None:
        """Loopback or a UNIX socket: the control endpoints check no key."""
        told = spec(socket=Path("/run/big-0.sock"))
        argv = command_for(told, {}).argv
        assert argv[argv.index("--uds") + 1] == "/run/big-0.sock"
        assert not {"--host", "--port"} & set(argv)
        assert (told.endpoint.uds, told.endpoint.base_url) == ("/run/big-0.sock", "http://localhost")

    @pytest.mark.parametrize(
        ("changes", "fault"),
        [
            ({"host": "0.0.0.0"}, "reachable from outside"),
            ({"socket": Path("/" + "x" * 108)}, "longer than the 107 bytes"),
            ({"engine": EngineKind.ATTACHED}, "url: is required"),
            ({"url": "http://h"}, "only an attached engine"),
            ({"engine": EngineKind.ATTACHED, "url": "h:1"}, "is not an http"),
            ({"engine": EngineKind.LLAMA_SERVER, "socket": Path("/x")}, "only vllm"),
        ],
    )
    def test_impossible_settings_are_refused(self, changes: dict[str, object], fault: str) -> None:
        """Before anything starts."""
        with pytest.raises(InvalidSpec, match=fault):
            spec(**changes)

    @pytest.mark.parametrize("name", ["max_num_seqs", "--uds", "served-model-name", "max-model-len"])
    def test_a_flag_of_vllm_that_a_key_decides_is_refused(self, name: str) -> None:
        """Each setting is given in one place."""
        with pytest.raises(InvalidSpec, match="is decided by the key"):
            command_for(spec(args={name: 1}), {})

    def test_tools_are_sent_if_vllm_has_a_parser_for_calls(self) -> None:
        """Otherwise it refuses the request."""
        parser: dict[str, Flag] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
        assert (takes_tools(spec()), takes_tools(spec(args=parser))) == (False, True)


class TestDevices:
    @pytest.mark.parametrize(
        ("args", "env", "environment", "devices"),
        [
            ({}, {}, {}, {"*"}),
            ({}, {}, {"CUDA_VISIBLE_DEVICES": "0, 1"}, {"0", "1"}),
            ({}, {"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "0"}, {"2"}),
            ({"device-ids": "3"}, {"CUDA_VISIBLE_DEVICES": "2"}, {}, {"3"}),
        ],
    )
    def test_known_adapters(
        self, args: dict[str, Flag], env: dict[str, str], environment: dict[str, str], devices: set[str]
    ) -> None:
        """A request without an adapter may use any engine."""
        assert starting_devices(spec(args=args, env=env), environment) == devices

    async def test_one_start_at_a_time_on_a_device(self) -> None:
        """Starts on other devices go on; an engine without a device waits for none."""
        gate = StartGate()
        entered: list[str] = []

        async def start(name: str, *devices: str) -> None:
            await gate.enter(frozenset(devices))
            entered.append(name)

        first = await gate.enter(frozenset({"0"}))
        async with anyio.create_task_group() as tasks:
            for name, *devices in (("same", "0", "1"), ("other", "2"), ("none",)):
                tasks.start_soon(start, name, *devices)
            await anyio.wait_all_tasks_blocked()
            assert entered == ["other", "none"]
            first.release()
            first.release()
            await anyio.wait_all_tasks_blocked()
            assert entered == ["other", "none", "same"]
            tasks.start_soon(start, "any", "*")
            await anyio.wait_all_tasks_blocked()
            assert entered == ["other", "none", "same"]
            tasks.cancel_scope.cancel()


class TestAdapters:
    def test_vllm_has_one_place_more_than_there_are_adapters(self) -> None:
        """On a CPU the base's tokens take the last place's adapter when both are batched."""
        argv = command_for(spec(adapters={"poet": "/a/poet", "clerk": "/a/clerk"}), {}).argv
        assert argv[argv.index("--max-loras") + 1] == argv[argv.index("--max-cpu-loras") + 1] == "3"
        at = argv.index("--lora-modules")
        assert argv[at + 1 : at + 3] == ("poet=/a/poet", "clerk=/a/clerk")
        assert adapted(spec(), ["poet"], "poet") == ("poet", {})
        assert adapted(spec(), ["poet"], None) == ("big", {})

    def test_llama_server_gets_every_adapter_with_every_request(self) -> None:
        """An adapter that is left out keeps its slot's prefix, and the cache in RAM ignores adapters."""
        told = spec(engine=EngineKind.LLAMA_SERVER, model="/m.gguf", adapters={"poet": "/p.gguf", "clerk": "/c.gguf"})
        argv = command_for(told, {}).argv
        assert argv[argv.index("--lora-scaled") + 1] == "/p.gguf:0,/c.gguf:0"
        assert argv[argv.index("--cache-ram") + 1] == "0"
        assert adapted(told, list(told.adapters), "clerk")[1] == {
            "lora": [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 1.0}]
        }
        assert adapted(told, list(told.adapters), None)[1] == {
            "lora": [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.0}]
        }
        with pytest.raises(InvalidSpec, match="comma or a colon"):
            command_for(spec(engine=EngineKind.LLAMA_SERVER, model="/m.gguf", adapters={"p": "/a,b"}), {})
