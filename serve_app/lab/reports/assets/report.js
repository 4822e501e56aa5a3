"use strict";
// Draws the plots of a report. Tables, verdict and interval pictures do not need JavaScript.
(() => {
  const HEIGHT = 300;
  const ZOOM = 0.7;
  const plots = [];

  const number = (value, digits) => value.toLocaleString("en", { maximumSignificantDigits: digits });

  function written(value, unit, digits = 3) {
    if (value === null || value === undefined) return "-";
    if (unit === "share") return `${number(100 * value, digits)} %`;
    if (unit === "count") return Math.round(value).toLocaleString("en");
    if (unit === "dollars") return `$${value.toLocaleString("en", { maximumFractionDigits: 2 })}`;
    if (unit === "seconds") {
      if (value === 0) return "0";
      return Math.abs(value) < 1 ? `${number(1000 * value, digits)} ms` : `${number(value, digits)} s`;
    }
    return number(value, digits);
  }

  // Ticks of a logarithmic axis: powers of two, or 1, 2 and 5 of each decade, or fewer.
  function powers(low, high, base) {
    const found = [];
    if (!(low > 0 && high > low)) return found;
    const decades = Math.log10(high / low);
    const steps = base === 2 ? [1] : decades < 1 ? [1, 2, 3, 5, 7] : decades < 3.5 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log(low) / Math.log(base)); base ** power <= high; power++) {
      for (const step of steps) {
        const value = Number((step * base ** power).toPrecision(12));
        if (value >= low && value <= high) found.push(value);
      }
    }
    return found.length > 1 ? found : [low, (low + high) / 2, high].map((value) => Number(value.toPrecision(3)));
  }

  // Colours are read at each drawing, because the colour scheme and printing change them.
  const colour = (element, name) => getComputedStyle(element).getPropertyValue(name).trim();

  class ReportPlot {
    constructor(figure) {
      this.figure = figure;
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.drawing = figure.querySelector(".drawing");
      this.readingAt = figure.querySelector(".reading-at");
      this.outputs = [...figure.querySelectorAll(".legend output")];
      this.switches = [...figure.querySelectorAll(".legend input")];
      this.swatches = [...figure.querySelectorAll(".swatch")];
      this.logarithmic = { x: this.data.x.logarithmic, y: this.data.y.logarithmic };
      this.listen();
      this.draw();
    }

    listen() {
      for (const each of this.figure.querySelectorAll("[hidden]")) each.hidden = false;
      for (const [place, each] of this.switches.entries()) {
        each.disabled = false;
        each.addEventListener("change", () => {
          showEverywhere(this.data.series[place].name, each.checked, this.figure.closest("section"));
        });
      }
      for (const each of this.figure.querySelectorAll("[data-axis]")) {
        each.addEventListener("change", () => {
          this.logarithmic[each.dataset.axis] = each.checked;
          this.draw();
        });
      }
      this.figure.querySelector(".whole").addEventListener("click", () => this.showWhole());
      this.drawing.addEventListener("keydown", (event) => this.onKey(event));
      this.drawing.addEventListener("focus", () => {
        if (this.drawing.matches(":focus-visible")) this.moveTo(Math.floor(this.data.positions.length / 2));
      });
      // Runs before the plot's own listener, which then shows the full range.
      this.drawing.addEventListener("dblclick", () => (this.zoomed = false), true);
      new ResizeObserver(() => this.fit()).observe(this.drawing);
    }

    show(name, isShown) {
      for (const [place, series] of this.data.series.entries()) {
        if (series.name !== name) continue;
        this.switches[place].checked = isShown;
        this.plot.setSeries(place + 1, { show: isShown });
      }
    }

    draw() {
      if (this.plot) this.plot.destroy();
      this.plot = new uPlot(this.options(), this.columns(), this.drawing);
    }

    columns() {
      const { positions, series } = this.data;
      // A logarithmic axis cannot show zero.
      const fit = (value, axis) => (value !== null && this.logarithmic[axis] && value <= 0 ? null : value);
      const kept = positions.map((place, index) => index).filter((index) => fit(positions[index], "x") !== null);
      this.kept = kept;
      return [
        kept.map((index) => positions[index]),
        ...series.map((one) => kept.map((index) => fit(one.values[index], "y"))),
      ];
    }

    options() {
      return {
        width: Math.max(240, this.drawing.clientWidth),
        height: HEIGHT,
        legend: { show: false },
        scales: { x: this.scale("x"), y: this.scale("y") },
        axes: [this.axis("x"), this.axis("y")],
        series: [{}, ...this.data.series.map((one, place) => this.series(one, place))],
        cursor: { drag: { x: true, y: true, uni: 40 }, points: { size: 8 } },
        hooks: {
          setCursor: [(plot) => this.read(plot.cursor.idx)],
          setSelect: [(plot) => (this.zoomed = plot.select.width > 0 || this.zoomed)],
          draw: [(plot) => this.mark(plot)],
        },
      };
    }

    scale(name) {
      const scale = { time: false };
      if (this.logarithmic[name]) {
        scale.distr = 3;
        scale.log = this.data[name].base;
      }
      if (name === "x") scale.range = (plot, low, high) => this.horizontal(low, high);
      else scale.range = (plot, low, high) => this.vertical(low, high);
      return scale;
    }

    horizontal(low, high) {
      // Points at the edge would be clipped.
      const hasPoints = this.data.series.some((one) => one.style === "points") && !this.isZoomed();
      const pad = hasPoints ? 0.03 : 0;
      if (low !== high && this.logarithmic.x) return [low / (high / low) ** pad, high * (high / low) ** pad];
      if (low !== high) return [low - pad * (high - low), high + pad * (high - low)];
      return this.logarithmic.x ? [low / 2, high * 2] : [low - 1, high + 1];
    }

    vertical(low, high) {
      // No visible value can be shown on this axis.
      const isFit = Number.isFinite(low) && Number.isFinite(high) && (low > 0 || !this.logarithmic.y);
      if (!isFit || low === null) return [this.logarithmic.y ? 1 : 0, 10];
      if (this.logarithmic.y) return [low / 1.15, high * 1.15];
      if (this.data.y.unit === "share" && low >= 0 && high > 0.5 && high <= 1 && !this.isZoomed()) return [0, 1.01];
      const pad = 0.05 * (high - low || Math.abs(high) || 1);
      // Durations and counts begin at zero unless the reader zooms in.
      return [low >= 0 && !this.isZoomed() ? 0 : low - pad, high + pad];
    }

    isZoomed() {
      return Boolean(this.plot && this.zoomed);
    }

    axis(name) {
      const { label, unit, base } = this.data[name];
      const ink = () => colour(this.drawing, "--muted");
      const rule = () => colour(this.drawing, "--rule");
      return {
        label,
        labelSize: 24,
        size: name === "x" ? 40 : 64,
        font: "12px system-ui, sans-serif",
        labelFont: "13px system-ui, sans-serif",
        stroke: ink,
        grid: { stroke: rule, width: 1 },
        ticks: { stroke: rule, width: 1 },
        space: name === "x" ? 60 : 32,
        splits: this.logarithmic[name] ? (plot, place, low, high) => powers(low, high, base) : undefined,
        filter: (plot, splits) => splits,
        values: (plot, splits) => splits.map((value) => (value === null ? "" : written(value, unit, 4))),
      };
    }

    series(one, place) {
      const stroke = () => colour(this.swatches[place], "--colour");
      const isPoints = one.style === "points";
      // A constant line has no points, because it is not a series of measurements.
      const isLevel = this.data.positions.length > 1 && new Set(one.values).size === 1;
      const dash = { dashed: [8, 5], baseline: [5, 4] }[one.style];
      return {
        label: one.name,
        show: this.switches[place].checked,
        stroke,
        width: isPoints ? 0 : 2,
        dash,
        spanGaps: false,
        paths: isPoints ? () => null : undefined,
        points: isPoints
          ? { show: true, size: 10, fill: stroke, stroke }
          : { show: this.data.positions.length < 40 && !isLevel, size: 6, fill: stroke, stroke },
      };
    }

    mark(plot) {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colour(this.drawing, "--muted");
      ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      for (const one of this.data.marks) {
        const right = bbox.left + bbox.width;
        let x = Math.round(plot.valToPos(one.at, "x", true));
        // The last position may be the middle of a bin that ends at the mark.
        if (x > right && x < right + 0.02 * bbox.width) x = right;
        if (x < bbox.left || x > right) continue;
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        const isRight = x > bbox.left + bbox.width / 2;
        ctx.textAlign = isRight ? "right" : "left";
        ctx.fillText(one.name, x + (isRight ? -5 : 5) * devicePixelRatio, bbox.top + 13 * devicePixelRatio);
      }
      ctx.restore();
    }

    // Reading

    read(index) {
      const isThere = index !== null && index !== undefined;
      const place = isThere ? this.kept[index] : null;
      const { x, y, series, positions } = this.data;
      this.readingAt.textContent = isThere ? `at ${x.label} ${written(positions[place], x.unit)}:` : "";
      for (const [number, output] of this.outputs.entries()) {
        output.textContent = isThere ? written(series[number].values[place], y.unit) : "";
      }
    }

    moveTo(index) {
      const { plot } = this;
      const last = this.kept.length - 1;
      this.index = Math.max(0, Math.min(last, index));
      const left = plot.valToPos(plot.data[0][this.index], "x");
      plot.setCursor({ left, top: plot.over.clientHeight / 2 });
    }

    onKey(event) {
      const step = event.shiftKey ? 10 : 1;
      const at = this.plot.cursor.idx ?? this.index ?? 0;
      const actions = {
        ArrowLeft: () => this.moveTo(at - step),
        ArrowRight: () => this.moveTo(at + step),
        Home: () => this.moveTo(0),
        End: () => this.moveTo(this.kept.length - 1),
        "+": () => this.zoom(at, ZOOM),
        "-": () => this.zoom(at, 1 / ZOOM),
        Escape: () => this.showWhole(),
      };
      const action = actions[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action();
    }

    // Range

    zoom(at, factor) {
      const { plot } = this;
      const [first, last] = [plot.data[0][0], plot.data[0][plot.data[0].length - 1]];
      const log = this.logarithmic.x;
      const [into, back] = log ? [Math.log, Math.exp] : [(value) => value, (value) => value];
      const centre = into(plot.data[0][at]);
      const low = centre + factor * (into(plot.scales.x.min) - centre);
      const high = centre + factor * (into(plot.scales.x.max) - centre);
      this.zoomed = true;
      plot.setScale("x", { min: Math.max(first, back(low)), max: Math.min(last, back(high)) });
      this.moveTo(at);
    }

    showWhole() {
      this.zoomed = false;
      this.plot.setData(this.plot.data, true);
    }

    fit() {
      const width = this.drawing.clientWidth;
      if (width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: HEIGHT });
    }

    redraw() {
      this.plot.redraw(false, true);
    }
  }

  // A series has the same name in all plots of a section, so hiding it in one hides it in all.
  function showEverywhere(name, isShown, section) {
    for (const plot of plots) if (section.contains(plot.figure)) plot.show(name, isShown);
  }

  for (const figure of document.querySelectorAll("figure.plot")) plots.push(new ReportPlot(figure));
  const redraw = () => plots.forEach((plot) => plot.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", () => plots.forEach((plot) => (plot.fit(), plot.redraw())));
  document.documentElement.dataset.plots = String(plots.length);
})();
