"""Agreement between processes: weight-update handshake, job control."""
