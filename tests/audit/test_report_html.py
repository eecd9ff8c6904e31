"""The HTML report in the real Chromium: a cell is clicked, the finding is read, nothing is fetched."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from mtpconvert.audit.api import audit
from mtpconvert.audit.report import render
from tests.support.browser import page
from tests.support.sabotage import change_tensor, drop, exchange
from tests.support.tiny import write_tiny

BAD = "model.layers.3.eh_proj.weight"


def test_click_a_cell_and_read_the_finding(tmp_path: Path) -> None:
    left = write_tiny("deepseek_v3", tmp_path / "<left> & \u2028")
    right = tmp_path / "right"
    shutil.copytree(left, right)
    change_tensor(BAD, lambda x: np.roll(x, x.shape[1] // 2, 1))(right)
    exchange("model.layers.1.mlp.experts.0.down_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight")(right)
    drop(lambda name: name == "model.layers.3.enorm.weight")(right)
    (tmp_path / "report.html").write_text(render(audit(left, right), "html"), encoding="utf-8")
    with page(tmp_path / "profile") as tab:
        tab.open(tmp_path / "report.html")
        assert tab.evaluate("document.getElementById('verdict').textContent") == "fail"
        assert "<left> & " in tab.evaluate("document.getElementById('sides').textContent")
        assert tab.evaluate("document.querySelectorAll('.mtp-row').length") == 1
        assert tab.evaluate("document.querySelectorAll('.mtp-row button.missing').length") == 1
        tab.click(f"button[data-name='{BAD}']")
        detail = tab.evaluate("document.getElementById('detail').textContent")
        assert "bytes-differ" in detail and "halves exchanged" in detail and BAD in detail
        tab.click("#filter")
        tab.type("expert.down")
        rows = tab.evaluate("[...document.querySelectorAll('#rows tr')].map((row) => row.textContent)")
        assert len(rows) == 2 and all("experts 0 and 3 exchanged" in row for row in rows)
        tab.screenshot(tmp_path / "shot.png")
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith("file:")] == []
