"""The shell around the pure parts: watches, server-side apply, admission over HTTPS, probes."""
