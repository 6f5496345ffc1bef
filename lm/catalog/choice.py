"""What a SageMaker job is submitted with: its machines, image, price and limits, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Tuple

from lm.catalog import Image, Instance, Price
from lm.schema import SageMaker


@dataclass(frozen=True)
class Choice:
    """What a job is submitted with. image: None where cluster.image_uri is the user's own."""

    instance: Optional[Instance]
    image: Optional[Image]
    price: Optional[Price]
    region: str
    max_run_seconds: int
    max_wait_seconds: int  # of spot, waiting and running together
    warnings: Tuple[str, ...]

    def cost_usd(self, cluster: SageMaker, seconds: float) -> Optional[float]:
        """What so long a run costs on demand, or None where no price is known."""
        return None if self.price is None else self.price.cost_usd(cluster.instance_count, seconds)

    def has_debugger(self, cluster: SageMaker) -> bool:
        """Whether Debugger's agent measures the hosts of the job."""
        return cluster.debugger and self.image is not None and self.image.debugger

    def rows(self, cluster: SageMaker) -> List[Tuple[str, str]]:
        """The machines, the image and the price as people read them."""
        gpu = self.instance.gpu if self.instance else "GPU"
        what = f"{cluster.gpus_per_host} {gpu} each" if cluster.gpus_per_host else "no GPU"
        hourly, most = self.cost_usd(cluster, 3600), self.cost_usd(cluster, self.max_run_seconds)
        limit = f"{self.max_run_seconds:,} s at the most"
        if hourly is None or most is None or self.price is None:
            price_row = f"not known for {cluster.instance_type} in {self.region}; {limit}"
        else:
            kind = "on demand, an upper bound of spot" if cluster.spot else "on demand"
            price_row = f"{hourly:,.2f} USD an hour {kind} (as of {self.price.as_of}); {limit}: {most:,.2f} USD"
        return [
            ("machines", f"{cluster.instance_count} x {cluster.instance_type}, {what}, in {self.region}"),
            ("image", self.image.name if self.image else str(cluster.image_uri)),
            ("price", price_row),
        ]
