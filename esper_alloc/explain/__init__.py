"""Why a request for memory failed, and which changes replay shows to help. Needs numpy."""
