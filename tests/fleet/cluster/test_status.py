"""When an application counts as complete: `up` then prints the address of its routers."""

from typing import Any

from hotset.fleet.cluster.application import is_complete


def member(role: str, phase: str = "ready", up: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"role": role, "phase": phase, "url": f"http://{role}", "up": up}


def test_an_application_is_complete_if_all_are_ready_and_every_router_has_reached_all_engines() -> None:
    engines = ("http://prefill", "http://decode")
    ready = [member("prefill"), member("decode"), member("router", up=engines)]
    counts = {"prefill": 1, "decode": 1, "router": 1}
    assert is_complete({"members": ready, "counts": counts})
    for members in (
        ready[:2],
        [*ready, member("decode")],
        [ready[0], member("decode", "starting"), ready[2]],
        [*ready[:2], member("router", up=engines[:1])],
    ):
        assert not is_complete({"members": members, "counts": counts})
    assert not is_complete({"members": [*ready, member("router")], "counts": counts | {"router": 2}})
