"""Fair comparison of KV caches: arms that differ in nothing else, tasks, controls, statistics, a verdict."""
