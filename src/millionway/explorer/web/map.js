"use strict";
// The map: points far out, thumbnails as one comes nearer. Drawn by deck.gl.

const PALETTE = [
  [31, 119, 180], [255, 127, 14], [44, 160, 44], [214, 39, 40], [148, 103, 189], [140, 86, 75], [227, 119, 194],
  [23, 190, 207], [188, 189, 34], [57, 59, 121], [99, 121, 57], [140, 109, 49], [132, 60, 57], [123, 65, 115],
  [82, 84, 163], [181, 207, 107], [206, 109, 189], [231, 186, 82], [214, 97, 107], [107, 110, 207],
];
const UNKNOWN = [150, 150, 150];
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis
const THUMBNAIL = 52; // pixels on the screen
const FEW = 300, MANY = 4000; // images in view: up to FEW are always pictures, more than MANY never
const MAX_SHEETS = 24; // in view at once

const Atlas = {
  deck: null,
  positions: null, // Float32Array [images, 2], moves with the epochs
  colors: null, // Uint8Array [images, 4]
  shown: null, // places that stand out, or null
  view: null,
  sheets: {}, // number -> picture, null while it is on its way
  selected: -1,
  version: 0,

  open(container) {
    Atlas.positions = Data.places.slice();
    Atlas.colors = new Uint8Array(4 * Data.about.num).fill(200);
    Atlas.container = container;
    Atlas.view = Atlas.whole();
    Atlas.deck = new deck.Deck({
      parent: container,
      views: new deck.OrthographicView({ id: "map", flipY: false }),
      viewState: Atlas.view,
      controller: { dragPan: true, inertia: false, doubleClickZoom: true, touchRotate: false },
      onViewStateChange: ({ viewState }) => Atlas.look(viewState),
      onHover: (info) => Atlas.onHover(Atlas.placeOf(info), info.x, info.y),
      getCursor: ({ isDragging, isHovering }) =>
        document.body.classList.contains("lasso") ? "crosshair" : isDragging ? "grabbing" : isHovering ? "pointer" : "grab",
      onError: (error) => console.error(error),
      onAfterRender: () => { if (!document.body.dataset.drawn) document.body.dataset.drawn = performance.now().toFixed(0); },
      layers: [],
    });
    // A click is a click however slow the machine is; deck's own must be short.
    let down = null;
    container.addEventListener("pointerdown", (event) => { down = [event.clientX, event.clientY]; }, true);
    container.addEventListener("click", (event) => {
      const moved = down ? Math.hypot(event.clientX - down[0], event.clientY - down[1]) : 0;
      const box = container.getBoundingClientRect();
      const info = Atlas.deck.pickObject({ x: event.clientX - box.left, y: event.clientY - box.top, radius: 4 });
      if (moved < 5) Atlas.onClick(Atlas.placeOf(info));
    });
    new ResizeObserver(() => Atlas.draw()).observe(container);
    Atlas.draw();
  },

  onHover() {},
  onClick() {},

  size() {
    return [Atlas.container.clientWidth || 800, Atlas.container.clientHeight || 600];
  },

  whole() {
    const [width, height] = Atlas.size();
    return { target: [0, 0, 0], zoom: Math.log2(Math.min(width, height) / 2.15), minZoom: 5, maxZoom: 22 };
  },

  look(view) {
    Atlas.view = view;
    Atlas.deck.setProps({ viewState: view });
    clearTimeout(Atlas.later);
    Atlas.later = setTimeout(Atlas.draw, 60);
  },

  zoomBy(amount) {
    const zoom = Math.min(22, Math.max(5, Atlas.view.zoom + amount));
    Atlas.look({ ...Atlas.view, zoom });
  },

  goTo(place, zoom) {
    const target = [Atlas.positions[2 * place], Atlas.positions[2 * place + 1], 0];
    Atlas.look({ ...Atlas.view, target, zoom: Math.max(Atlas.view.zoom, zoom ?? Atlas.view.zoom) });
  },

  // [left, bottom, right, top] of what is in view
  bounds() {
    const [width, height] = Atlas.size(), scale = 2 ** Atlas.view.zoom, [x, y] = Atlas.view.target;
    return [x - width / 2 / scale, y - height / 2 / scale, x + width / 2 / scale, y + height / 2 / scale];
  },

  toScreen(place) {
    const [width, height] = Atlas.size(), scale = 2 ** Atlas.view.zoom, [x, y] = Atlas.view.target;
    return [
      (Atlas.positions[2 * place] - x) * scale + width / 2,
      height / 2 - (Atlas.positions[2 * place + 1] - y) * scale,
    ];
  },

  inView() {
    const [left, bottom, right, top] = Atlas.bounds(), found = [], p = Atlas.positions;
    for (let n = 0; n < Data.about.num; n++) {
      const x = p[2 * n], y = p[2 * n + 1];
      if (x >= left && x <= right && y >= bottom && y <= top && (!Atlas.shown || Atlas.shown.has(n))) found.push(n);
    }
    return found;
  },

  // As many as have room beside each other, the selected one first.
  chosen(places) {
    const cells = new Map(), scale = 2 ** Atlas.view.zoom, found = [];
    const first = places.includes(Atlas.selected) ? [Atlas.selected] : [];
    for (const place of first.concat(places)) {
      const x = Atlas.positions[2 * place] * scale, y = Atlas.positions[2 * place + 1] * scale;
      const column = Math.floor(x / THUMBNAIL), row = Math.floor(y / THUMBNAIL);
      let free = true;
      for (let n = 0; n < 9 && free; n++) {
        const other = cells.get(`${column - 1 + (n % 3)},${row - 1 + Math.floor(n / 3)}`);
        free = !other || Math.abs(other[0] - x) >= THUMBNAIL || Math.abs(other[1] - y) >= THUMBNAIL;
      }
      if (!free) continue;
      cells.set(`${column},${row}`, [x, y]);
      found.push(place);
    }
    return found;
  },

  placeOf(info) {
    if (!info || info.index < 0) return -1;
    return info.layer.id.startsWith("sheet") ? info.object : info.index;
  },

  draw() {
    if (!Atlas.deck) return;
    const places = Atlas.inView(), near = places.length <= Math.max(FEW, Math.min(MANY, Data.about.num / 2)), thumbnails = near ? Atlas.chosen(places) : [];
    const layers = [Atlas.points(near)], bySheet = new Map(), perSheet = Data.about.tiles ** 2;
    for (const place of thumbnails) {
      const sheet = Math.floor(Data.slots[place] / perSheet);
      if (!bySheet.has(sheet)) bySheet.set(sheet, []);
      bySheet.get(sheet).push(place);
    }
    let missing = 0;
    for (const [sheet, members] of [...bySheet].slice(0, MAX_SHEETS)) {
      if (Atlas.sheets[sheet]) layers.push(Atlas.pictures(sheet, members));
      else {
        missing++;
        if (!(sheet in Atlas.sheets)) Atlas.fetch(sheet);
      }
    }
    if (Atlas.selected >= 0) layers.push(Atlas.ring());
    Atlas.deck.setProps({ layers });
    document.body.dataset.thumbnails = missing ? 0 : thumbnails.length;
    Atlas.onDrawn(places.length, thumbnails.length);
  },

  onDrawn() {},

  async fetch(sheet) {
    Atlas.sheets[sheet] = null;
    try {
      const bytes = await Data.once(`sheet/${sheet}.jpg`);
      Atlas.sheets[sheet] = await createImageBitmap(new Blob([bytes], { type: "image/jpeg" }));
      Atlas.draw();
    } catch (error) {
      delete Atlas.sheets[sheet];
      console.error(error);
    }
  },

  points(near) {
    return new deck.ScatterplotLayer({
      id: "points",
      data: {
        length: Data.about.num,
        attributes: { getPosition: { value: Atlas.positions, size: 2 }, getFillColor: { value: Atlas.colors, size: 4, type: "unorm8" } },
        version: Atlas.version, // a new object is a new upload
      },
      dataComparator: (one, other) => one.version === other.version,
      getRadius: 1,
      radiusUnits: "pixels",
      radiusScale: near ? 4 : Data.about.num > 50000 ? 1.6 : Data.about.num > 5000 ? 2.2 : 3.5,
      pickable: true,
    });
  },

  pictures(sheet, members) {
    const { tile, tiles } = Data.about, mapping = {};
    for (const place of members) {
      const within = Data.slots[place] % (tiles * tiles);
      mapping[place] = { x: (within % tiles) * tile, y: Math.floor(within / tiles) * tile, width: tile, height: tile };
    }
    return new deck.IconLayer({
      id: "sheet" + sheet,
      data: members,
      iconAtlas: Atlas.sheets[sheet],
      iconMapping: mapping,
      getIcon: (place) => String(place),
      getPosition: (place) => [Atlas.positions[2 * place], Atlas.positions[2 * place + 1], 0],
      getSize: THUMBNAIL - 4,
      sizeUnits: "pixels",
      pickable: true,
      updateTriggers: { getPosition: Atlas.version, getIcon: members.length },
    });
  },

  ring() {
    const p = Atlas.positions, n = Atlas.selected;
    return new deck.ScatterplotLayer({
      id: "ring",
      data: [0],
      getPosition: () => [p[2 * n], p[2 * n + 1], 0],
      getRadius: THUMBNAIL * 0.75,
      radiusUnits: "pixels",
      filled: false,
      stroked: true,
      getLineColor: [37, 99, 235],
      getLineWidth: 3,
      lineWidthUnits: "pixels",
      updateTriggers: { getPosition: [n, Atlas.version] },
    });
  },

  // --- colors, epochs, regions ---------------------------------------------------------------------------------------

  paint(column, values) {
    for (let n = 0; n < Data.about.num; n++) {
      const color = values ? Atlas.colorOf(column, values[n]) : UNKNOWN;
      Atlas.colors.set(color, 4 * n);
      Atlas.colors[4 * n + 3] = Atlas.shown && !Atlas.shown.has(n) ? 25 : 210;
    }
    Atlas.colors = Atlas.colors.slice();
    Atlas.version++;
    Atlas.draw();
  },

  colorOf(column, value) {
    if (Number.isNaN(value)) return UNKNOWN;
    if (column.kind === "words") return PALETTE[value % PALETTE.length];
    const share = (value - column.low) / (column.high - column.low || 1) * (RAMP.length - 1);
    const low = Math.max(0, Math.min(RAMP.length - 2, Math.floor(share))), part = Math.min(1, share - low);
    return RAMP[low].map((from, n) => Math.round(from + (RAMP[low + 1][n] - from) * part));
  },

  // Images move to other places; those without one are not shown.
  move(places, positions) {
    cancelAnimationFrame(Atlas.frame);
    const from = Atlas.positions.slice(), to = new Float32Array(2 * Data.about.num).fill(1e6);
    places.forEach((place, n) => to.set(positions.subarray(2 * n, 2 * n + 2), 2 * place));
    const started = performance.now();
    const step = (now) => {
      const part = Math.min(1, (now - started) / 600), smooth = part * part * (3 - 2 * part);
      Atlas.positions = to.map((value, n) => (value > 1e5 || from[n] > 1e5 ? value : from[n] + (value - from[n]) * smooth));
      Atlas.version++;
      Atlas.draw();
      if (part < 1) Atlas.frame = requestAnimationFrame(step);
    };
    Atlas.frame = requestAnimationFrame(step);
  },

  // Places inside a polygon of screen points.
  within(polygon) {
    const found = [];
    for (const place of Atlas.inView()) {
      const [x, y] = Atlas.toScreen(place);
      let inside = false;
      for (let a = 0, b = polygon.length - 1; a < polygon.length; b = a++) {
        const [ax, ay] = polygon[a], [bx, by] = polygon[b];
        if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) inside = !inside;
      }
      if (inside) found.push(place);
    }
    return found;
  },
};
