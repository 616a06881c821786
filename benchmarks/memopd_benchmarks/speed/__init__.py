"""Speed and memory, always as ratios against a named alternative measured in the same run."""
