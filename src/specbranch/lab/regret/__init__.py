"""A regret lab: the planner on random machines and texts, compared with the best fixed method."""
