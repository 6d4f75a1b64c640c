"""`ViewWrapper` implements the whole `View` protocol."""

from unittest.mock import MagicMock

from hotset.lab.simulate.recorder import ViewWrapper
from hotset.memory.view import View


def test_the_wrapper_forwards_every_member_of_the_protocol() -> None:
    inner = MagicMock()
    view: View = ViewWrapper(inner)
    arguments = {"new_rows": (3,), "keys": (1,), "context": (2,), "select": (3, MagicMock()), "short_contexts": (3,)}
    members = {name for name in vars(View) if not name.startswith("_")}
    assert members == {"segments", "padded_seats", *arguments}
    for name in members:
        if name in arguments:
            assert getattr(view, name)(*arguments[name]) is getattr(inner, name).return_value
            getattr(inner, name).assert_called_once_with(*arguments[name])
        else:
            assert getattr(view, name) is getattr(inner, name)
