"""The specification of page_copy."""

from torch import Tensor


def copy(pieces: Tensor, device_rows: Tensor, host_rows: Tensor, *, to_host: bool) -> None:
    for device_row, host_row, rows in pieces.tolist():
        on_device = device_rows[:, device_row : device_row + rows]
        on_host = host_rows[:, host_row : host_row + rows]
        if to_host:
            on_host.copy_(on_device)
        else:
            on_device.copy_(on_host)
