import msgspec

from transport.dialects.llama_server import encode
from transport.request import ChatRequest, Message


def test_parameters_pass_through_and_owned_fields_are_ours() -> None:
    """Specification, "Generation parameters": unknown keys are kept, and fields that we own are overwritten."""
    params = {"temperature": 0.5, "grammar": "root ::= x", "logit_bias": {"5": -1}, "messages": [], "stream": False}
    request = ChatRequest(model="m", messages=(Message(role="user", content="é\u2028"),), params=params)
    assert msgspec.json.decode(encode(request)) == {
        "temperature": 0.5,
        "grammar": "root ::= x",
        "logit_bias": {"5": -1},
        "model": "m",
        "messages": [{"role": "user", "content": "é\u2028"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    assert params["stream"] is False
