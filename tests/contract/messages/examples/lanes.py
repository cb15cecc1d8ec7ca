"""The lane of all examples."""

LANE = "lane.2.tiny.high.3.w1"
