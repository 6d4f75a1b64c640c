"""Draws a plan: requests at once and tokens per second by context length, with tiers off and on."""

from hotset.lab.bench.svg import Line, Panel, page
from hotset.lab.plan.planner import Plan
from hotset.lab.plan.tables import describe

BLUE, GREY = "#1f5fa8", "#8a8a8a"


def picture(plan: Plan) -> str:
    """Returns the picture of the best split as SVG. Without one, it has no lines."""
    names = [f"{context // 1024}k" if context % 1024 == 0 else str(context) for context in plan.contexts]
    panels = []
    for title, field in (("Requests at once", "requests"), ("Tokens per second", "tokens_per_s")):
        lines = []
        for name, colour, decodes in (
            ("tiers off", GREY, plan.best.tiers_off if plan.best else ()),
            ("with tiers", BLUE, plan.best.tiers_on if plan.best else ()),
        ):
            values = [float(getattr(decode, field) or 0.0) for decode in decodes]
            points = [(index + 1.0, value) for index, value in enumerate(values)]
            lines.append(Line(points, colour, name, dots=True, labels=[f"{value:,.0f}" for value in values]))
        panels.append(Panel(title, "context length", title.lower(), lines, x_max=len(names) + 0.5, x_names=names))
    subtitle = f"{describe(plan.machine)} · {plan.best.name if plan.best else 'nothing fits'}"
    return page(plan.model, subtitle, panels)
