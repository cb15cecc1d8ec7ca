"""The lane that all examples use."""

LANE = "lane.2.tiny.high.3.w1"
