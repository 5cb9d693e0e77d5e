"""The online endpoint: a stateless proxy in front of the engines, a process of its own."""
