"use strict";
// What a person does: tabs, colors, lasso, search, keys.

const $ = (id) => document.getElementById(id);
const REFRESH = 20000; // milliseconds between looks at a run that may still train

const App = {
  colored: -1,

  async start() {
    App.theme(localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    try {
      await Data.open();
      Atlas.open($("map"));
    } catch (error) {
      $("status").textContent = `The page cannot be shown: ${error.message}`;
      throw error;
    }
    const about = Data.about;
    $("num-groups").textContent = about.num_groups ? `(${about.num_groups.toLocaleString("en")})` : "";
    document.querySelector("[data-tab=run]").hidden = !about.has_run;
    $("picture").hidden = !about.can_search;
    if (!about.can_search) $("find").placeholder = "Part of a path";
    App.listen();
    App.colors();
    App.lasso();
    if (about.can_search) App.drops();
    App.epochs();
  },

  listen() {
    for (const button of document.querySelectorAll("[data-tab]")) {
      button.addEventListener("click", () => App.tab(button.dataset.tab));
    }
    $("close").addEventListener("click", Panel.close);
    $("save").addEventListener("click", App.save);
    $("fit").addEventListener("click", () => Atlas.look(Atlas.whole()));
    $("theme").addEventListener("click", () => App.theme());
    $("keys").addEventListener("click", () => $("help").showModal());
    $("help-close").addEventListener("click", () => $("help").close());
    $("find").addEventListener("input", () => {
      clearTimeout(App.typing);
      App.typing = setTimeout(App.find, 200);
    });
    document.addEventListener("keydown", App.key);
    Atlas.onHover = App.hover;
    Atlas.onClick = (place) => { if (place >= 0 && !document.body.classList.contains("lasso")) Panel.image(place); };
    Atlas.onDrawn = (num, thumbnails) => {
      const what = thumbnails ? `${thumbnails.toLocaleString("en")} shown as pictures` : "come nearer for pictures";
      $("status").textContent = `${num.toLocaleString("en")} of ${Data.about.num.toLocaleString("en")} images in view, ${what}`;
    };
  },

  tab(name) {
    for (const button of document.querySelectorAll("[data-tab]")) {
      button.setAttribute("aria-pressed", button.dataset.tab === name);
      $(button.dataset.tab + "-tab").hidden = button.dataset.tab !== name;
    }
    if (name !== "map") Panel[name]();
    clearInterval(App.refresh);
    if (name === "run" && !Data.static) App.refresh = setInterval(Panel.run, REFRESH);
  },

  theme(name) {
    const root = document.documentElement;
    root.dataset.theme = name || (root.dataset.theme === "dark" ? "light" : "dark");
    localStorage.setItem("theme", root.dataset.theme);
  },

  // --- colors ---------------------------------------------------------------------------------------------------------

  colors() {
    const columns = Data.about.columns;
    $("color").replaceChildren(...columns.map((column, number) => Panel.make("option", { value: number }, column.title)));
    const first = ["label", "cluster"].map((name) => columns.findIndex((column) => column.name === name)).find((n) => n >= 0);
    $("color").value = first ?? 0;
    $("color").addEventListener("change", App.color);
    App.color();
  },

  async color() {
    const number = Number($("color").value), column = Data.about.columns[number];
    if (!column) return Atlas.paint(null, null);
    App.values = await Data.column(number);
    App.column = column;
    Atlas.paint(column, App.values);
    App.legend(column);
  },

  legend(column) {
    const legend = $("legend");
    if (column.kind === "words") {
      legend.replaceChildren(...column.words.slice(0, 40).map((word, number) => {
        const dot = Panel.make("i");
        dot.style.background = `rgb(${PALETTE[number % PALETTE.length]})`;
        return Panel.make("div", {}, dot, word);
      }));
      return;
    }
    const canvas = Panel.make("canvas", { width: 150, height: 1 }), pen = canvas.getContext("2d");
    for (let x = 0; x < 150; x++) {
      pen.fillStyle = `rgb(${Atlas.colorOf({ kind: "number", low: 0, high: 149 }, x)})`;
      pen.fillRect(x, 0, 1, 1);
    }
    const [low, high] = [column.low, column.high].map((value) => App.wordOf(column, value));
    legend.replaceChildren(Panel.make("div", {}, low, canvas, high));
  },

  wordOf(column, value) {
    if (column.kind === "words") return column.words[value];
    if (column.kind === "date") return new Date(value * 86400e3).toISOString().slice(0, 10);
    return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(3);
  },

  standOut(places) {
    Atlas.shown = places && new Set(places);
    Atlas.paint(App.column, App.values);
  },

  // --- search ---------------------------------------------------------------------------------------------------------

  async find() {
    const text = $("find").value.trim().toLowerCase();
    if (!text) return Panel.close();
    const found = [];
    (await Data.paths()).forEach((path, place) => { if (path.toLowerCase().includes(text)) found.push(place); });
    Panel.gallery(`“${text}”`, found);
  },

  async look(file) {
    $("status").textContent = "searching …";
    try {
      const found = await Data.search(file);
      const query = Panel.make("img", { alt: "the picture asked for", src: URL.createObjectURL(file) });
      Panel.gallery("Like your picture", found.places, found.cosines.map((cosine) => cosine.toFixed(2)), query);
    } catch (error) {
      Panel.places = [];
      Panel.open("Search", Panel.make("p", { role: "alert" }, error.message));
    }
    Atlas.draw();
  },

  drops() {
    $("picture").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => { if ($("file").files[0]) App.look($("file").files[0]); $("file").value = ""; });
    document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("drop"); });
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("drop"); });
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      document.body.classList.remove("drop");
      if (event.dataTransfer.files[0]) App.look(event.dataTransfer.files[0]);
    });
  },

  async save() {
    const paths = await Data.paths(), text = Panel.places.map((place) => paths[place] + "\n").join("");
    const address = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    Panel.make("a", { href: address, download: "images.txt" }).click();
    URL.revokeObjectURL(address);
  },

  async copy(text) {
    await navigator.clipboard.writeText(text);
    $("copy").textContent = "Copied";
  },

  // --- the map under the pointer ----------------------------------------------------------------------------------------

  async hover(place, x, y) {
    const card = $("hover");
    if (place < 0 || document.body.classList.contains("lasso")) { card.hidden = true; App.over = -1; return; }
    const [width, height] = Atlas.size();
    card.style.left = (x + 240 > width ? x - 220 : x + 16) + "px";
    card.style.top = Math.max(0, Math.min(y + 16, height - 250)) + "px";
    card.hidden = false;
    if (App.over === place) return;
    App.over = place;
    const value = App.values && App.values[place];
    const word = App.column && !Number.isNaN(value) ? `${App.column.title}: ${App.wordOf(App.column, value)}` : "";
    card.querySelector("figcaption").textContent = word;
    await Data.tile(card.querySelector(".tile"), place, 192);
    const paths = await Data.paths();
    if (App.over === place) card.querySelector("figcaption").textContent = `${paths[place].split("/").pop()} ${word && "· " + word}`;
  },

  lasso() {
    const map = $("map"), line = document.querySelector("#lasso-line polygon");
    let points = null;
    const on = (wanted) => {
      document.body.classList.toggle("lasso", wanted);
      $("lasso").setAttribute("aria-pressed", wanted);
      Atlas.deck.setProps({ controller: wanted ? false : { inertia: false } });
    };
    App.setLasso = on;
    $("lasso").addEventListener("click", () => on(!document.body.classList.contains("lasso")));
    const at = (event) => {
      const box = map.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const show = () => line.setAttribute("points", points ? points.map((point) => point.join(",")).join(" ") : "");
    map.addEventListener("pointerdown", (event) => {
      if (event.shiftKey) on(true);
      if (!document.body.classList.contains("lasso")) return;
      points = [at(event)];
      map.setPointerCapture(event.pointerId);
      event.stopPropagation();
    }, true);
    map.addEventListener("pointermove", (event) => {
      if (!points) return;
      points.push(at(event));
      show();
    }, true);
    map.addEventListener("pointerup", () => {
      if (!points) return;
      const found = points.length > 2 ? Atlas.within(points) : [];
      points = null;
      show();
      setTimeout(() => on(false), 0); // the click that ends a lasso chooses no image
      if (found.length) Panel.gallery("Region", found);
    }, true);
  },

  // --- epochs -----------------------------------------------------------------------------------------------------------

  async epochs() {
    const slider = $("epoch"), list = async () => (Data.static ? Data.about.epochs : (await (await fetch("data/epochs.json")).json()));
    const renew = async () => {
      App.known = await list();
      $("epochs").hidden = App.known.length < 2;
      const atEnd = slider.value === slider.max;
      slider.max = App.known.length; // the last one is the whole collection
      if (atEnd) slider.value = slider.max;
    };
    await renew();
    slider.value = slider.max;
    $("epoch-name").textContent = "now";
    slider.addEventListener("input", async () => {
      const epoch = App.known[Number(slider.value)];
      $("epoch-name").textContent = epoch ?? "now";
      if (epoch === undefined) return Atlas.move([...Array(Data.about.num).keys()], Data.places);
      const buffer = await Data.once(`epoch/${epoch}.bin`), num = buffer.byteLength / 12;
      if ($("epoch-name").textContent === String(epoch)) Atlas.move(new Int32Array(buffer, 0, num), new Float32Array(buffer, 4 * num));
    });
    if (!Data.static && Data.about.has_run) setInterval(() => renew().catch(() => {}), REFRESH);
  },

  // --- keys -------------------------------------------------------------------------------------------------------------

  key(event) {
    if (event.key === "Escape") {
      if (document.body.classList.contains("lasso")) App.setLasso(false);
      else if (!$("help").open) { $("find").blur(); Panel.close(); }
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    const tabs = ["map", "duplicates", "outliers", "run"].filter((name) => !document.querySelector(`[data-tab=${name}]`).hidden);
    const acts = {
      "/": () => $("find").focus(),
      "?": () => $("help").showModal(),
      "+": () => Atlas.zoomBy(1),
      "=": () => Atlas.zoomBy(1),
      "-": () => Atlas.zoomBy(-1),
      0: () => Atlas.look(Atlas.whole()),
      l: () => App.setLasso(!document.body.classList.contains("lasso")),
      d: () => App.theme(),
      ArrowRight: () => { if (Atlas.selected >= 0 && Panel.near && Panel.near.length) Panel.image(Panel.near[0].place); },
      ArrowLeft: () => { if (Panel.back.length) Panel.image(Panel.back.pop(), true); },
      1: () => App.tab(tabs[0]), 2: () => App.tab(tabs[1]), 3: () => App.tab(tabs[2]), 4: () => tabs[3] && App.tab(tabs[3]),
    };
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act) { event.preventDefault(); act(); }
  },
};

App.start();
