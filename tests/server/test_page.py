"""The page at /, in headless Chromium: it loads nothing from elsewhere, chats, and draws."""

import re

import pytest
from browser import PROGRAM, Browser
from live import Live, slow, until

import onchip
import tiny
from onchip.server.app import build

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")]


def test_chat_charts_and_kernels(tmp_path, monkeypatch):
    llm = onchip.LLM(tiny.save(tmp_path / "model", max_position_embeddings=512), device="cpu")
    with Live(build(llm, "tiny-model")) as live, Browser(tmp_path / "profile") as page:
        page.call("Page.navigate", url=f"{live.address}/")
        until(lambda: page.run("document.getElementById('health')?.className") == "good")
        for asked in (1, 2):
            page.run("at('most').value = 24; at('text').value = 'why <b>wait</b>?'; at('form').requestSubmit()")
            until(lambda asked=asked: page.run("document.querySelectorAll('#log small').length") == asked)
        assert page.run("document.querySelector('#log .user').textContent") == "why <b>wait</b>?"  # text, not markup
        assert re.match(r"\d+ tokens in ", page.run("document.querySelector('#log small').textContent"))
        assert page.run("messages.map(m => m.role).join()") == "user,assistant,user,assistant"
        slow(monkeypatch, llm)
        page.run("at('most').value = 400; at('text').value = 'the quick brown'; at('form').requestSubmit()")
        until(lambda: page.run("running && document.querySelector('#log .assistant:last-child').textContent.length > 8"))
        page.run("at('clear').click()")  # in the middle of an answer
        until(lambda: not page.run("running"))
        assert page.run("messages.length + document.querySelectorAll('#log > div').length") == 0
        until(lambda: page.run("document.querySelectorAll('svg polyline').length") == 9)  # six charts, three of them with two lines
        until(lambda: "sample" in page.run("document.getElementById('kernels').innerText"))
        assert page.run("performance.getEntriesByType('resource').every(r => r.name.startsWith(location.origin))")
        unnamed = "[...document.querySelectorAll('input, textarea, button')].filter(e => !e.labels?.length && !e.textContent.trim()).length"
        assert page.run(unnamed) == 0
        page.screenshot(tmp_path / "light.png")
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 23)"
        page.screenshot(tmp_path / "dark.png")
        assert page.complaints == []
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("light.png", "dark.png"))
