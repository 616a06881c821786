"""Who is measured: whole studies such as the quickstart, and what they report."""
