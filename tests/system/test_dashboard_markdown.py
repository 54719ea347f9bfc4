"""Markdown of models and tools in a real Chromium: it is shown; no code runs, no file loads, no link is followed."""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.harness.browser import Page, on_overview
from tests.harness.service import Document, Service, scripted_model, serving

TEXT = """# A heading

Some **bold** and *emphasis* with `code`,
and a second line.

1. one
2. two
   - inner

| a | b |
| - | - |
| 1 | 2 |

```python
print("<b>")
```

> quoted [a link](https://example.org/x?a=1) and <me@example.org>
"""
HOSTILE = {
    "a script": "<script>window.harmed = 1</script>",
    "a picture of markup": '<img src="http://127.0.0.1:1/x" onerror="window.harmed=1">',
    "a picture": "![x](http://127.0.0.1:1/picture.png)",
    "a picture of data": "![x](data:image/svg+xml;base64,PHN2Zz4=)",
    "a picture by reference": "![x][p]\n\n[p]: http://127.0.0.1:1/p.png",
    "a script's address": "[x](javascript:window.harmed=1)",
    "a script's address, coded": "[x](&#106;avascript:window.harmed=1)",
    "a script's address, spaced": "[x](java\tscript:window.harmed=1)",
    "a script's address by reference": "[x][s]\n\n[s]: JaVaScRiPt:window.harmed=1",
    "an automatic address": "<javascript:window.harmed=1>",
    "an address of VBScript": "[x](vbscript:msgbox)",
    "a page as data": "[x](data:text/html,<script>window.harmed=1</script>)",
    "a file": "[x](file:///etc/passwd)",
    "an address of this page": "[x](/v1/jobs) [y](#/post) [z](../v1/config/reload)",
    "an address without a scheme": "[x](//127.0.0.1:1/x)",
    "attributes": '[x](http://127.0.0.1:1 "y\\" onmouseover=window.harmed=1")',
    "a frame": '<iframe src="http://127.0.0.1:1"></iframe>',
    "a form": '<form action="http://127.0.0.1:1"><input autofocus onfocus="window.harmed=1"></form>',
    "a style": "<style>* { display: none }</style>",
    "a picture of lines": '<svg onload="window.harmed=1"><a href="javascript:window.harmed=1">x</a></svg>',
    "a language": '```" onload=window.harmed=1 x\ncode\n```',
    "a base": '<base href="http://127.0.0.1:1/"><meta http-equiv="refresh" content="0;url=http://127.0.0.1:1">',
}
SLOW = {
    "quotes": ">" * 20_000,
    "lists": "".join(f"{'  ' * depth}- x\n" for depth in range(140)),
    "brackets": "[" * 20_000,
    "links": "[a](" * 5_000,
    "emphasis": "*a **a " * 2_500,
    "emphasis of two kinds": "*a_ " * 5_000,
    "ticks": "".join(f"e{'`' * count}" for count in range(1, 190)),
    "references": "".join(f"[{n}]: u\n" for n in range(1_500)) + "[0] " * 900,
    "tables": "|" * 9_000 + "\n" + "-|" * 5_000,
    "entities": "&" * 20_000,
    "angles": "<" * 20_000,
    "comments": "<!--" * 5_000,
    "pictures": "![" * 10_000,
    "nul": "\0" * 20_000,
}
SHOW = """(async (text) => {
  const { loadMarkdown, showMarkdown } = await import("/web/markdown.js");
  await loadMarkdown();
  document.querySelector("#tried")?.remove();
  const node = document.createElement("div");
  node.id = "tried";
  node.className = "words";
  document.querySelector("main").append(node);
  const before = performance.now();
  showMarkdown(node, text);
  return performance.now() - before;
})(%s)"""
LOOK = """(() => {
  const all = [...document.querySelectorAll("#tried *")];
  return {
    tags: [...new Set(all.map((each) => each.localName))],
    attributes: [...new Set(all.flatMap((each) => each.getAttributeNames()))],
    links: all.filter((each) => each.localName === "a").map((each) => each.href),
    text: document.querySelector("#tried").innerText,
    depth: Math.max(0, ...all.map((each) => {
      let depth = 0;
      for (; each.id !== "tried"; each = each.parentNode) depth += 1;
      return depth;
    })),
    harmed: window.harmed ?? null,
    asked: performance.getEntriesByType("resource").map((each) => each.name)
      .filter((name) => !name.startsWith(location.origin)),
  };
})()"""
TAGS = {
    *("p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td"),
    *("strong", "em", "s", "hr", "br", "code", "pre", "a", "span", "div", "button"),
}
ATTRIBUTES = {"class", "type", "tabindex", "href", "rel", "target", "title", "start"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("markdown")
    script = folder / "script.json"
    script.write_text(json.dumps([{"content": TEXT}] * 9))
    models = {"m": scripted_model(free_ports(1), slots=1, script=str(script))}
    with serving(folder, free_ports(1), models) as running:
        yield running


@pytest.fixture
def shown(service: Service, page: Page) -> Iterator[Page]:
    with on_overview(page, service.url, 1280) as live:
        yield live


def look(page: Page, text: str) -> Document:
    """Show a text; return the page's contents."""
    took_ms = page.run(SHOW % json.dumps(text))
    told: Document = {**page.run(LOOK), "took_ms": took_ms}
    assert set(told["tags"]) <= TAGS, told
    assert set(told["attributes"]) <= ATTRIBUTES, told
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in told["links"]), told
    assert (told["harmed"], told["asked"]) == (None, []), told
    return told


def test_markdown_of_models_is_shown(shown: Page) -> None:
    """Headings, lists, tables, code and links; a line that ends, ends."""
    told = look(shown, TEXT)
    assert {"h3", "strong", "em", "code", "br", "ol", "ul", "table", "pre", "blockquote", "a"} <= set(told["tags"])
    assert told["links"] == ["https://example.org/x?a=1", "mailto:me@example.org"]
    assert 'print("<b>")' in told["text"]
    assert shown.run("[...document.querySelectorAll('#tried a')].every((each) => each.rel.includes('noopener'))")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_markdown_is_text(shown: Page, name: str) -> None:
    """No script runs and no request is sent; links lead only to the web and to mail."""
    told = look(shown, HOSTILE[name])
    assert not {"img", "script", "iframe", "svg", "form", "style"} & set(told["tags"])
    for link in told["links"]:
        assert not link.startswith(shown.run("location.origin"))
    shown.run("document.querySelectorAll('#tried span').forEach((each) => each.click())")
    assert shown.run("window.harmed ?? null") is None


@pytest.mark.parametrize("name", SLOW)
def test_slow_markdown_is_bounded(shown: Page, name: str) -> None:
    """In the time of a long task, and in depth."""
    told = look(shown, SLOW[name])
    assert told["took_ms"] < 1500, told["took_ms"]
    assert told["depth"] <= 60, told["depth"]


def test_a_long_text_is_not_parsed(shown: Page) -> None:
    """It would be parsed again at each word that arrives."""
    told = look(shown, "**x** " * 4000)
    assert (told["tags"], told["text"].count("**x**")) == ([], 4000)


def test_a_transcript_shows_markdown_or_the_exact_words(service: Service, shown: Page) -> None:
    """A reader who needs the exact words switches it off."""
    job = {"name": "md", "agents": [{"id": "a", "model": "m"}], "conversations": [{"id": "c", "prompt": "Go."}]}
    job_id = service.post_job(job)
    service.wait_ended(job_id)
    shown.run(f"location.hash = '#/jobs/{job_id}/c'")
    shown.wait("document.querySelector('.words h3')?.textContent === 'A heading'", "it is shown as Markdown")
    shown.click("#as-markdown")
    shown.wait(f"document.querySelector('.words').textContent === {json.dumps(TEXT)}", "the very words are shown")
    shown.click("#as-markdown")
    shown.wait("document.querySelector('.words table') !== null", "it is Markdown again")


def test_an_answer_in_the_chat_is_markdown_that_can_be_copied_and_edited(shown: Page) -> None:
    """Code can be copied too; editing puts the words back into the field."""
    shown.click('a[href="#/chat"]')
    shown.wait("document.querySelector('#chat-model')?.value === 'm'", "the model is there")
    shown.run("document.querySelector('#chat-text').value = 'Ask.'")
    shown.click("form button.main")
    shown.wait("document.querySelector('.chat .words table') !== null", "the answer is Markdown")
    shown.wait("document.querySelectorAll('.chat .copy').length === 2", "it and its code can be copied")
    shown.run("[...document.querySelectorAll('.chat button')].find((each) => each.textContent === 'Edit').click()")
    shown.wait("document.querySelector('#chat-text').value === 'Ask.'", "the words are in the field")
    assert shown.run("document.querySelectorAll('.chat section').length") == 0
