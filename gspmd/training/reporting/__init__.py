"""What a run shows and leaves behind: metrics, events, tables, pictures."""
