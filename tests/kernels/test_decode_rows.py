"""Compares decode_rows with values decoded one by one in plain Python, bit by bit, over poisoned memory."""

import pytest
import torch
from interpreted import INTERPRETED, triton_impl
from torch import Tensor

from hotset.kernels.decode_rows import decode_rows, reference
from hotset.kernels.rows import RowLayout, mla_row

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LAYOUTS = {
    "rank 512, rope 64": mla_row(512, 64, torch.bfloat16, fp8=True),
    "rank 64": mla_row(64, 16, torch.bfloat16, fp8=True),
}


def stored_rows(layout: RowLayout, count: int) -> Tensor:
    """Returns rows with all codes, random scales, and random other values."""
    values = torch.randn(count, layout.width) * torch.rand(count, 1).mul(12).exp2()
    return layout.encode(values.to(torch.bfloat16))


def expected(rows: Tensor, row_ids: Tensor, layout: RowLayout) -> Tensor:
    scale_bytes = slice(layout.quantised, layout.quantised + 4 * layout.scales)
    result = []
    for row in rows[row_ids]:
        scales = row[scale_bytes].clone().view(torch.float32).tolist()
        codes = row[: layout.quantised].clone().view(torch.float8_e4m3fn).double().tolist()
        values = [code * scales[entry // 128] for entry, code in enumerate(codes)]
        others = row[scale_bytes.stop : layout.row_bytes].clone().view(torch.bfloat16)
        result.append(torch.cat((torch.tensor(values, dtype=torch.float64).float().to(torch.bfloat16), others)))
    return torch.stack(result)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("count", [1, 8, 21])
def test_rows_are_decoded_in_the_order_of_their_ids(layout: RowLayout, count: int) -> None:
    rows, row_ids = stored_rows(layout, 30), torch.randint(30, (count,))
    op = triton_impl("decode_rows") if INTERPRETED else reference
    assert op.decode_rows(rows, row_ids, layout).equal(expected(rows, row_ids, layout))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 1000, 33_000])
def test_on_a_gpu_rows_have_the_bits_of_the_reference(layout: RowLayout, count: int) -> None:
    rows, row_ids = stored_rows(layout, 5000), torch.randint(5000, (count,))
    on_gpu = decode_rows(rows.cuda(), row_ids.cuda(), layout)
    assert on_gpu.cpu().equal(reference.decode_rows(rows, row_ids, layout))
