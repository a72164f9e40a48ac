"""Measured times as a few figures."""

PERCENTILES = (50, 90, 99)


def spread(seconds: list[float]) -> dict[str, float] | None:
    """Mean, percentiles (nearest rank) and maximum in milliseconds; None without a value."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in PERCENTILES}
    figures = {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}
    return {name: round(1000 * value, 3) for name, value in figures.items()}
