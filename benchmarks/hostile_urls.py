"""Addresses of images by which a caller would reach what is not the caller's to reach."""

from __future__ import annotations

HOSTS = ("images.example.com", "localhost")
"""The list of hosts beside which they are tried: one leads to this machine itself."""

HOSTILE_URLS = (
    # Not the web.
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "file://localhost/etc/passwd",
    "ftp://images.example.com/a.png",
    "gopher://127.0.0.1:6379/_INFO",
    "unix:///var/run/docker.sock",
    "jar:http://images.example.com/a.zip!/a.png",
    "javascript:fetch('http://127.0.0.1')",
    # No address at all, or one that is read in several ways.
    "/etc/passwd",
    "../secret.png",
    "//127.0.0.1/a.png",
    "http:127.0.0.1/a.png",
    "http:///a.png",
    " http://127.0.0.1/a.png",
    "http://127.0.0.1\t/a.png",
    "http://127.0.0.1\\@images.example.com/a.png",
    "http://images.example.com\r\nHost: 127.0.0.1/a.png",
    # This machine, in all spellings.
    "http://127.0.0.1/a.png",
    "http://127.1/a.png",
    "http://2130706433/a.png",
    "http://0x7f000001/a.png",
    "http://0177.0.0.1/a.png",
    "http://0.0.0.0/a.png",
    "http://[::1]/a.png",
    "http://[::ffff:127.0.0.1]/a.png",
    "http://[::ffff:7f00:1]/a.png",
    "http://①②⑦.⓪.⓪.①/a.png",
    # Names on the list that lead to this machine.
    "http://localhost/a.png",
    "https://LOCALHOST/a.png",
    "http://localhost./a.png",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ/a.png",
    # The network around, and the cloud's own addresses.
    "http://169.254.169.254/latest/meta-data/",
    "http://[fe80::1]/a.png",
    "http://[fd00:ec2::254]/latest/meta-data/",
    "http://[64:ff9b::a9fe:a9fe]/a.png",
    "http://10.0.0.1/a.png",
    "http://192.168.0.1/a.png",
    "http://metadata.google.internal/computeMetadata/v1/",
    # Names that look like those on the list.
    "http://images.example.com@127.0.0.1/a.png",
    "http://127.0.0.1@images.example.com/a.png",
    "http://images.example.com.attacker.net/a.png",
    "http://images.example.com:22/a.png",
)
