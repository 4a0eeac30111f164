"""What the doctor does: facts are collected, judged, and put into words."""
