"""Is all well with this installation and this pair, and what is to be gained?"""
