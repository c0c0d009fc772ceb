"""Data sets that everybody begins with: where their files are, their checksums and their terms.

SHA-256 and sizes are those that torchvision, TensorFlow Datasets and Keras compare with, and where
these have MD5 alone (CIFAR-10's binary form) those that several projects noted beside it. MNIST's
test files were compared with real ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFile:
    """A file of a data set.

    Attributes:
        name: Below the URL of each of its homes.
        size: In bytes.
        sha256: Of its content, in hex.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class KnownSet:
    """A data set.

    Attributes:
        name: As one types it.
        about: What it is.
        homes: Where its files are, the first one first.
        files: They; archives are unpacked.
        licence: On which terms one gets it.
        reads: What reads it in Python, ``{}`` for its folder.
    """

    name: str
    about: str
    homes: tuple[str, ...]
    files: tuple[KnownFile, ...]
    licence: str
    reads: str

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(file.size for file in self.files)


_IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx(*facts: tuple[int, str]) -> tuple[KnownFile, ...]:
    return tuple(KnownFile(name, *fact) for name, fact in zip(_IDX, facts, strict=True))


KNOWN = {
    known.name: known
    for known in (
        KnownSet(
            "mnist",
            "70,000 handwritten digits, 28x28",
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "https://storage.googleapis.com/cvdf-datasets/mnist",
            ),
            _idx(
                (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            ),
            "CC BY-SA 3.0, by Yann LeCun and Corinna Cortes",
            'sp.data.idx("{}", "train")',
        ),
        KnownSet(
            "fashion_mnist",
            "70,000 articles of clothing, 28x28",
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ),
            _idx(
                (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
                (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
                (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
                (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            ),
            "MIT, by Zalando SE",
            'sp.data.idx("{}", "train")',
        ),
        KnownSet(
            "cifar10",
            "60,000 small photos of 10 kinds, 32x32 in colour",
            ("https://www.cs.toronto.edu/~kriz", "https://cave.cs.toronto.edu/kriz"),
            (
                KnownFile(
                    "cifar-10-binary.tar.gz",
                    170052171,
                    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                ),
            ),
            "its authors name none; they ask to cite A. Krizhevsky, Learning Multiple Layers of "
            "Features from Tiny Images, 2009",
            'sp.data.cifar10("{}", "train")',
        ),
        KnownSet(
            "cats_vs_dogs",
            "25,000 photos of cats and dogs, of any size; some are broken",
            ("https://download.microsoft.com/download/3/E/1/3E1C3F21-ECDB-4869-8368-6DEBA77B919F",),
            (
                KnownFile(
                    "kagglecatsanddogs_5340.zip",
                    824887076,
                    "b7974bd00a84a99921f36ee4403f089853777b5ae8d151c76a86e64900334af9",
                ),
            ),
            "CDLA-Permissive-2.0, whose text lies beside the photos",
            'sp.data.image_folder("{}/PetImages", (180, 180))',
        ),
        KnownSet(
            "tiny_shakespeare",
            "a megabyte of Shakespeare's plays",
            ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",),
            (
                KnownFile(
                    "input.txt",
                    1115394,
                    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                ),
            ),
            "the text is in the public domain",
            'sp.data.characters("{}/input.txt")',
        ),
    )
}
"""All that have a name."""
