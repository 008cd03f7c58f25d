"""Folders that other tools write are read as those tools read them, or refused."""

from tensorkeep.testing.folder_suite import FolderSuite


class TestFolders(FolderSuite):
    pass
