"""Online traffic to measure with: a trace of arrivals, sent to a chat endpoint on time."""
