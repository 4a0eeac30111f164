"""What every picture must be."""

from typing import Any


def assert_no_title_is_cut_or_covered(figure: Any, count: int) -> None:
    """So many titles lie inside the picture, and none over another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.findobj(lambda one: hasattr(one, "get_title") and hasattr(one, "axison"))
    titles = [axis._left_title for axis in axes if axis.axison and axis._left_title.get_text()]
    boxes = [title.get_window_extent(canvas.get_renderer()) for title in titles]
    assert len(boxes) == count
    for number, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:number])
