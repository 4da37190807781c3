"""What a run of any size needs, known before it starts: memory, traffic and time of every layout."""
