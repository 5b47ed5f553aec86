"""scripts/gpu_timeline.py without a card: kinds, sums and the drawing."""

from __future__ import annotations

from xml.etree import ElementTree

from scripts.gpu_timeline import Kernel, draw, layer, totals

STEP = [
    Kernel("void rms_norm_kernel<bf16>", 0, 2),
    Kernel("nvjet_sm90_tst_64x8", 3, 10),
    Kernel("trireme::decode_kernel<a & b>", 12, 5),
    *(Kernel(f"decode_kernel {i}", 20 + 5 * i, 5) for i in range(3)),
]


def test_sums_are_by_kind_and_tell_what_is_idle() -> None:
    found = totals(STEP)
    assert found["attention"] == (20, 4)
    assert found["products"] == (10, 1)
    assert found["idle"] == (4, 0)  # 2 to 3 and 17 to 20; the kernels that overlap count once
    assert list(found) == ["attention", "products", "idle", "norm"]


def test_a_layer_ends_where_the_next_begins() -> None:
    assert [kernel.name for kernel in layer(STEP, 0)] == ["trireme::decode_kernel<a & b>"]
    assert [kernel.start for kernel in layer(STEP, 2)] == [25]
    assert layer(STEP, 9) == STEP  # there is no such layer


def test_the_picture_shows_the_first_layers_and_the_whole_step() -> None:
    picture = ElementTree.fromstring(draw(STEP, "a <b>"))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["a <b>", "the first 25 us, to scale"]
    assert "the whole step, 35 us, 6 launches" in texts
    assert "20 us, 57.1%, 4 launches" in texts
    titles = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "trireme::decode_kernel<a & b> 5.0 us",
        "decode_kernel 0 5.0 us",
        "void rms_norm_kernel<bf16> 2.0 us",
        "nvjet_sm90_tst_64x8 10.0 us",
    ]
