"""The mark a listener puts on its functions; prime_rl.hookspecs lists what can be listened to."""

from __future__ import annotations

import pluggy

hookimpl = pluggy.HookimplMarker("prime_rl")
