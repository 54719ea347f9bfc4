"""A server's error messages, in any form: one reader for bodies and for frames of streams.

OpenAI's own form nests an object below ``error``. Others put a text there, or send flat fields (``message``,
``detail``, ``code``), lists, null for missing values, and numbers as text.

Sources: recorded answers of some thirty servers; llama.cpp, ``tools/server``; vLLM, ``entrypoints``; FastAPI; LiteLLM.
"""

import json
import re
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from transport.errors import UNDECODABLE, CacheFull, ContextOverflow, EngineOverloaded, EngineRejected

MAX_ERROR_CHARS: Final = 4 * 1024  # longest error message that is kept
MAX_TYPE_CHARS: Final = 200
MAX_RETRY_DIGITS: Final = 9
MOST_NESTED: Final = 4  # depth of errors within errors, and within lists
MOST_FAULTS: Final = 10  # faults of a request that are read from one list
SERVER_ERROR: Final = 500  # status of an error that names none
_BAD: Final = 400
_TOO_MANY: Final = 429
_UNAVAILABLE: Final = 503
_WORDS: Final = ("message", "msg", "detail", "error_description", "description", "reason", "title")
_NUMBERS: Final = ("code", "status_code", "statusCode", "status", "raw_status_code", "http_status", "http_code")
_KINDS: Final = ("code", "status", "error_type", "type")  # clearest first
_LEAST_STATUS, _MOST_STATUS = 400, 599
_FIELDS: Final = re.compile(rb'"(?:errors?|message|msg|detail|error_description|description|reason|title|object)"')
_EVENT: Final = re.compile(rb"\A\s*(?:event:[^\r\n]*[\r\n]+)?(?:data|error):[ ]?(?P<data>[^\r\n]*)")

FULL_WORDS: Final = "Context size has been exceeded"  # llama.cpp's words for its full shared KV cache
# A prompt that is too long, in the words of llama.cpp, vLLM, SGLang, TGI, llama-cpp-python, OpenAI, Ollama, Anthropic,
# Xinference, Bedrock, Perplexity and LiteLLM.
OVERFLOW: Final = re.compile(
    r"(?:maximum|model'?s|max(?:imum)? model|available|allowed) (?:context|model) (?:len|length|window|size)"
    r"|max(?:imum)?[ _]model[ _]len|exceed_context_size|context[ _](?:length|window|size)[ _]exceeded"
    r"|exceed\w* (?:the |its |our |this |max\w* |available |allowed |model'?s? |configured )*context"
    r"|context (?:length|window|size)[^.]{0,40}(?:exceed|too (?:small|short)|overflow)|context overflow"
    r"|longer than the (?:maximum|model|context)|(?:prompt|input|request|conversation|messages?) (?:is|are) too long"
    r"|prompt too (?:long|large)|too[ _]many[ _](?:prompt[ _]|input[ _])?tokens(?! per)|input[ _]too[ _]long"
    r"|reduce the length of (?:the |your )?(?:messages?|prompt|input)"
    r"|`inputs`(?: tokens)? (?:must have less than|\+ `max_new_tokens`)"
    r"|(?:prompt|input)(?: tokens| length)?[^.]{0,60}exceed\w*[^.]{0,60}(?:context|tokens)",
    re.IGNORECASE,
)
# Similar words about an answer's bound or a rate of tokens: the prompt fits.
FITS: Final = re.compile(
    r"max_(?:completion_|new_|output_)?tokens\W[^.]{0,80}(?:too (?:large|big|high)|must be|at most|exceed)"
    r"|rate[ _-]?limit|(?:per|a)[ -](?:minute|hour|day)",
    re.IGNORECASE,
)
# Faults of requests that llama.cpp answers with 500 though it is well: it throws while it reads the request.
CLIENTS_FAULTS: Final = re.compile(
    r"' is required|input is not supported|Jinja Exception|raise_exception|json\.exception|Cannot use (?:both|custom)"
    r"|requires? --|cannot make (?:GET|HEAD) request|(?:parse|parsing) (?:grammar|json_schema|tool)"
    r"|JSON schema conversion|chat template|roles must alternate|role not supported|unsupported (?:param|content)"
    r"|(?:load|decode) (?:image|audio)|Invalid (?:JSON|type|value|param|input|request|url|image|audio)"
    r"|Unable to generate parser",
    re.IGNORECASE,
)
# Words of an engine about itself, and empty words: another moment may bring another answer.
PASSING: Final = re.compile(
    r"\A\W*(?:no body|(?:internal|unknown|unexpected)?[ _]*(?:server)?[ _]*error[^a-z]*|internal)\W*\Z"
    # its devices, its memory and its numbers
    r"|memory|cuda|cublas|hip error|rocm|metal|\bmps\b|nccl|device|gpu|alloc|kv[ -]?cache|cache is|\bnan\b|\binf\b"
    r"|tensor|compute error|decode failed|failed to (?:decode|sample)|no space|disk|database"
    # its processes and others behind it
    r"|engine ?(?:core|dead|loop|process)|\bworkers?\b|runner|\bactor\b|replica|terminat|crash|unexpected(?:ly| eof)"
    r"|has stopped|no longer running|exit status|killed|restarting|(?:is|still) (?:starting|loading)"
    r"|not (?:ready|loaded)|loading (?:the )?model|shut(?:ting)? ?down|degraded|: refused"
    r"|connection (?:refused|reset|error|aborted|closed|lost)"
    r"|\beof\b|broken pipe|hang ?up|upstream|gateway|dial tcp|reset by"
    # its load
    r"|time[d -]*out|temporar|try again|retry|unavailable|overload|busy|slots?\b|queue|too many requests|at capacity"
    r"|out of resources|resource (?:limit|exhaust)"
    # nothing in particular
    r"|cancel|abort|broke the answer off|went wrong|error (?:while|was|has|occurred)|during generation"
    r"|InternalServerError|internal (?:server )?error|exception occurred",
    re.IGNORECASE,
)
# Names of error kinds, without case and marks, and the statuses that they stand for.
STATUSES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("invalidrequest", "badrequest", "invalidargument", "invalidparameter", "invalidvalue"), _BAD),
    **dict.fromkeys(("tooluse", "toolusefailed", "failedprecondition", "invalidprompt", "contextlengthexceeded"), _BAD),
    **dict.fromkeys(("contentfilter", "contentpolicyviolation", "contextwindowexceeded", "jsonvalidatefailed"), _BAD),
    **dict.fromkeys(("unsupportedvalue", "unsupportedparameter", "missingrequiredparameter", "stringabovemax"), _BAD),
    **dict.fromkeys(("authentication", "unauthorized", "unauthenticated", "invalidapikey"), 401),
    **dict.fromkeys(("permission", "permissiondenied", "forbidden"), 403),
    **dict.fromkeys(("notfound", "modelnotfound"), 404),
    "requesttoolarge": 413,
    **dict.fromkeys(("validation", "unprocessableentity"), 422),
    **dict.fromkeys(("ratelimit", "ratelimitexceeded", "ratelimitreached", "toomanyrequests"), _TOO_MANY),
    **dict.fromkeys(("resourceexhausted", "insufficientquota", "quotaexceeded"), _TOO_MANY),
    **dict.fromkeys(("overloaded", "serviceunavailable", "unavailable", "engineoverloaded"), _UNAVAILABLE),
    **dict.fromkeys(("timeout", "deadlineexceeded", "gatewaytimeout"), 504),
}


class Refusal(Struct, frozen=True, kw_only=True):
    """An error's message, kind and status; the status is None if no number gives it.

    ``likely_status`` is the one that its kind stands for.
    """

    message: str
    kind: str = ""
    status: int | None = None
    likely_status: int | None = None


def refusal_in(document: object, nested: int = 0) -> Refusal | None:
    """Return the error in a JSON document of any form; None if there is none."""
    document = _first_of(document)
    if not isinstance(document, Mapping) or nested > MOST_NESTED:
        return None
    error, words = _error_of(document), _words_of(document)
    if isinstance(error, Mapping):
        deeper = refusal_in(error, nested + 1) if _error_of(error) else None
        return deeper or _refusal_of(error, beside=document)
    if isinstance(error, str) and error.strip():
        return _refusal_of({**document, "message": f"{error}: {words}" if words and words != error else error})
    is_named = bool(error) or "error" in (document.get("object"), document.get("type"))
    if not is_named and ("choices" in document or not words):
        return None
    inner = document.get("detail")  # FastAPI's, around whatever its route raises
    return (refusal_in(inner, nested + 1) if isinstance(inner, Mapping) else None) or _refusal_of(document)


def _first_of(value: object) -> object:
    return value[0] if isinstance(value, list) and value else value


def _error_of(document: Mapping[str, object]) -> object:
    return _first_of(document.get("error") or document.get("errors"))


def tells_words(frame: bytes) -> bool:
    """Whether a frame that is not an answer may be an error: a frame without words is not read twice."""
    return _FIELDS.search(frame) is not None


def decode_error(status: int, headers: Mapping[str, str], body: bytes) -> EngineRejected:
    """Return the error of an answer other than 200, with any body."""
    retry_after = headers.get("retry-after", "")
    retry_after_s = float(retry_after[:MAX_RETRY_DIGITS]) if retry_after.isdecimal() else None
    return rejection(read_refusal(body), status, retry_after_s)


def read_refusal(body: bytes) -> Refusal:
    """Return the error in a body: JSON, a stream that begins with one, or plain text."""
    event = _EVENT.match(body)
    try:
        found = refusal_in(msgspec.json.decode(event["data"] if event is not None else body))
    except UNDECODABLE:
        found = None
    return found or Refusal(message=body[:500].decode("utf-8", "replace").strip() or "no body")


def encode_error(error: EngineRejected) -> bytes:
    """Return a refusal in the form of OpenAI's surface."""
    fields = {
        "message": error.message,
        "type": error.kind or "invalid_request_error",
        "param": None,
        "code": error.status,
    }
    return msgspec.json.encode({"error": fields})


def rejection(refusal: Refusal, status: int, retry_after_s: float | None) -> EngineRejected:
    """Return the error that a refusal stands for; ``status`` applies if it names none."""
    message, kind = refusal.message[:MAX_ERROR_CHARS], refusal.kind[:MAX_TYPE_CHARS]
    status = refusal.status or (refusal.likely_status if status == SERVER_ERROR else None) or status
    if FULL_WORDS in message:
        if status == SERVER_ERROR:
            return CacheFull(status, kind, message)
    elif (OVERFLOW.search(kind) or OVERFLOW.search(message)) and not FITS.search(message):
        return ContextOverflow(_BAD if status >= SERVER_ERROR else status, kind, message)
    if status == SERVER_ERROR and CLIENTS_FAULTS.search(message):
        status = _BAD
    if status in (_TOO_MANY, _UNAVAILABLE):
        return EngineOverloaded(status, kind, message, retry_after_s)
    return EngineRejected(status, kind, message)


def says_why(error: EngineRejected) -> bool:
    """Whether an engine's failure may be about the request: it gives a reason, and none about itself."""
    if error.status != SERVER_ERROR or isinstance(error, CacheFull):
        return False
    return " " in error.message.strip() and PASSING.search(error.message) is None  # one word is no reason


def _refusal_of(error: Mapping[str, object], beside: Mapping[str, object] | None = None) -> Refusal:
    """Read an error's own fields; missing ones may stand ``beside`` it."""
    places = [error] if beside is None else [error, {**beside, "error": None, "object": None, "message": None}]
    status = next((number for each in places if (number := _number_of(each)) is not None), None)
    names = [name for each in places for name in _names_of(each)]
    known = [STATUSES[key] for name in names if (key := _key_of(name)) in STATUSES]
    message = next((text for each in places if (text := _words_of(each))), "")
    kind = next(filter(OVERFLOW.search, names), names[-1] if names else "")
    return Refusal(
        message=message or kind or json.dumps(error, default=str)[:MAX_ERROR_CHARS],
        kind=kind,
        status=status,
        likely_status=known[0] if known else None,
    )


def _number_of(error: Mapping[str, object]) -> int | None:
    for name in _NUMBERS:
        value = error.get(name)
        if isinstance(value, str) and len(value) == 3 and value.isdecimal():  # noqa: PLR2004 - digits of a status
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and _LEAST_STATUS <= value <= _MOST_STATUS:
            return value
    return None


def _names_of(error: Mapping[str, object]) -> list[str]:
    """Return the names of its kind."""
    names = [value for name in _KINDS if isinstance(value := error.get(name), str)]
    return [name for name in names if name.strip() and not name.isdecimal() and name not in ("error", "None")]


def _key_of(name: str) -> str:
    key = "".join(filter(str.isalnum, name.casefold()))
    return key if key in STATUSES else key.removesuffix("error").removesuffix("exception")


def _words_of(error: Mapping[str, object], nested: int = 0) -> str:
    for name in _WORDS:
        words = _text_of(error.get(name), nested)
        if words:
            return words
    return ""


def _text_of(value: object, nested: int = 0) -> str:
    """Return words, or those of a list of faults with their places, as FastAPI sends them."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list) and nested <= MOST_NESTED:
        return "; ".join(text for each in value[:MOST_FAULTS] if (text := _text_of(each, nested + 1)))
    if isinstance(value, Mapping) and nested <= MOST_NESTED:
        place = value.get("loc")
        words = _words_of(value, nested + 1) or _text_of(value.get("error"), nested + 1)
        return f"{'.'.join(map(str, place))}: {words}" if words and isinstance(place, list) else words
    return ""
