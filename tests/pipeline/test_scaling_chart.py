"""The report's curve of scaling: predicted steps, published measurements, and the run's own place among them."""

from __future__ import annotations

import re

from pipeline.report.data import ReportData
from pipeline.report.page import render
from pipeline.report.scaling_chart import scaling_chart
from train.contracts.mesh_shape import MeshShape
from train.contracts.values import EpochRecord
from train.planning.scaling_step import PUBLISHED, SIZES
from train.planning.scaling_table import Planned, scaling_table
from train.strategies.exchanges import Work

HOSTILE = "<script>alert('x')</script>\"&"


def test_the_report_draws_the_curve_with_published_points_and_says_its_inputs():
    work = Work(0.1, 32, gradient_bytes=1e8, weight_bytes=1e8)
    document = scaling_table(Planned("torch_ddp", work, HOSTILE, MeshShape(data=2), 10.0)).document()
    document["this_run"] = {"num_ranks": 2, "efficiency": 0.8}
    train = {"status": "ok", "train": {"strategy": "torch_ddp", "world_size": 2}}
    history = (EpochRecord(0, 5, 0.5, 0.5, 1e-3, 2.0, None),)
    page, without = (render(ReportData("r", train, history=history, scaling=each)) for each in (document, None))
    assert page.count("<circle") - without.count("<circle") == len(SIZES) + len(PUBLISHED) + 1
    assert "<script" not in page and "100.0 ms of 32 images" in page and "arXiv:1802.05799" in page
    chart = scaling_chart(document)
    assert all(16 <= float(y) <= 300 - 42 for y in re.findall(r'cy="([\d.]+)"', chart)), "they are between 0 and 1"
    assert "More ranks" not in without
