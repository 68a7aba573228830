// Writes example_workflows/ (graph and picture) and their API twins, by building each graph in a real ComfyUI's browser page.
// usage: node make_examples.mjs '{"url", "examples", "twins", "playwright", "chromium", "only"}' (only: a part of the titles to make)

import { mkdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const options = JSON.parse(process.argv[2]);
const HF = "https://huggingface.co";
const GEMMA3 = { name: "gemma_3_12B_it.safetensors", url: `${HF}/Comfy-Org/ltx-2/resolve/main/split_files/text_encoders/gemma_3_12B_it.safetensors`, directory: "text_encoders" };
const file = (repo, path, directory) => ({ name: path.split("/").pop(), url: `${HF}/${repo}/resolve/main/${path}`, directory });
const MODELS = {
  "LTX-2.3": [file("Lightricks/LTX-2.3", "ltx-2.3-22b-dev.safetensors", "checkpoints"), GEMMA3],
  "LTX-2": [file("Lightricks/LTX-2", "ltx-2-19b-dev.safetensors", "checkpoints"), GEMMA3],
  "LTX-2.5": [
    file("Lightricks/LTX-2.5", "diffusion_models/ltx-2.5-22b-dev-transformer-bf16.safetensors", "diffusion_models"),
    file("Lightricks/LTX-2.5", "text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors", "text_encoders"),
    file("Lightricks/LTX-2.5", "vae/ltx-2.5-video-vae-conv-bf16.safetensors", "vae"),
    file("Lightricks/LTX-2.5", "vae/ltx-2.5-audio-vae-bf16.safetensors", "vae"),
  ],
  "LTX-Video": [
    file("Lightricks/LTX-Video", "ltxv-2b-0.9.6-dev-04-25.safetensors", "checkpoints"),
    file("comfyanonymous/flux_text_encoders", "t5xxl_fp16.safetensors", "text_encoders"),
  ],
};
const HOW = `
1. Put your clips into a folder below ComfyUI's **input** or **datasets** folder, with a .txt caption of the same name beside each, and press **R**.
2. Choose the model and the folder, then **Run**. The dataset node tells what it found in every clip before anything is loaded.
3. The train node shows loss and previews while a process of its own trains. **Interrupt** saves a snapshot; run it again to go on.
4. The LoRA lands in \`output/loras/ltx_train/\` and is in LoraLoader's list after pressing **R**; *LoRA name* of the train node plugs straight into it.`;

const common = { dataset: "input/my_clips", buckets: "768x512x49;512x768x49" };
const EXAMPLES = [
  { title: "LTX-2.3 - 1 Character LoRA", line: "LTX-2.3", mode: "i2v_audio", dataset: { ...common, trigger: "ohwx person" }, train: { run_name: "my_character", rank: 32, steps: 2000 }, preview: "ohwx person smiles and waves at the camera, rain on the window", about: "A person, animal or figure with its voice: in half of the clips the first frame is given, so the LoRA serves image to video and text to video. 15 to 40 clips of 2 to 4 seconds are a good start." },
  { title: "LTX-2.3 - 2 Style LoRA from Images", line: "LTX-2.3", mode: "images", dataset: { ...common, buckets: "768x512;512x768;640x640", trigger: "in the style of mystyle" }, train: { run_name: "my_style", rank: 16, steps: 1500 }, preview: "a harbour at dawn, in the style of mystyle", frames: 1, about: "A look from 20 to 200 pictures. Pictures train the video stream alone; clips may be mixed in by adding a bucket with frames." },
  { title: "LTX-2.3 - 3 Control IC-LoRA", line: "LTX-2.3", mode: "v2v", dataset: { ...common, reference_video: "input/my_references" }, train: { run_name: "my_control", rank: 32, steps: 3000, learning_rate: 2e-4 }, preview: "", about: "A reference clip (depth, pose, edges, or any other version of the clip) steers the result. Each reference has the name of its clip and lies in the folder named under *reference video folder*." },
  { title: "LTX-2.3 - 4 Sound LoRA", line: "LTX-2.3", mode: "t2a", dataset: { ...common, buckets: "auto" }, train: { run_name: "my_sound", rank: 32, steps: 3000, learning_rate: 2e-4 }, preview: "footsteps on gravel, a door creaks", sound: true, about: "Sound from text: only the sound stream's weights are loaded. The dataset may be sound files or clips with sound." },
  { title: "LTX-2.3 - 5 Extend and Inpaint LoRA", line: "LTX-2.3", mode: "inpaint_random", dataset: { ...common }, train: { run_name: "my_inpaint", rank: 32, steps: 2000 }, preview: "", modeSettings: true, about: "A new box to fill is drawn in each clip, and in the mode settings a beginning of random length may be given as well: the LoRA learns to fill and to go on." },
  { title: "LTX-2.3 - 6 Preview between Parts", line: "LTX-2.3", mode: "t2v_audio", dataset: { ...common, trigger: "ohwx person" }, train: { run_name: "my_character_parts", rank: 32, steps: 2000, steps_this_run: 250 }, preview: "", sampled: "ohwx person smiles and waves at the camera, rain on the window", about: "Trains 250 steps each time it is queued, then samples with ComfyUI's own nodes and the LoRA of that step: set the number beside **Run** to 8, and each run adds one clip. In between the trainer waits in host memory with the GPU free; the next part goes on within seconds. Both need host memory for the model at the same time." },
  { title: "LTX-2.5 - 1 Character LoRA", line: "LTX-2.5", mode: "i2v_audio", dataset: { ...common, trigger: "ohwx person" }, train: { run_name: "my_character_25", rank: 32, steps: 2000 }, preview: "ohwx person smiles and waves at the camera, rain on the window", about: "As the first example, with the split files of LTX-2.5: transformer, text encoder and both VAEs are found in their folders (auto)." },
  { title: "LTX-2 - 1 Character LoRA", line: "LTX-2", mode: "i2v_audio", dataset: { ...common, trigger: "ohwx person" }, train: { run_name: "my_character_2", rank: 32, steps: 2000 }, preview: "ohwx person smiles and waves at the camera, rain on the window", about: "As the first example, with LTX-2 19B." },
  { title: "LTX-Video - 1 Character LoRA", line: "LTX-Video", mode: "i2v", dataset: { ...common, trigger: "ohwx person" }, train: { run_name: "my_character_v", rank: 32, steps: 1500 }, preview: "ohwx person smiles and waves at the camera", about: "LTX-Video 2B makes video without sound and trains on small cards." },
];

function spec(one) {
  const nodes = {
    note: { type: "MarkdownNote", pos: [-440, 0], size: [400, 430], widgets: { text: `## ${one.title}\n${one.about}\n${HOW}` } },
    model: { type: "LTXTrainLoadModel", pos: [0, 0], size: [380, 240], widgets: { model: MODELS[one.line][0].name }, models: MODELS[one.line] },
    dataset: { type: "LTXTrainDataset", pos: [0, 300], size: [380, 640], widgets: one.dataset },
    encode: { type: "LTXTrainPreprocess", pos: [430, 0], size: [380, 330], widgets: { mode: one.mode } },
    train: { type: "LTXTrainLoRA", pos: [860, 0], size: [460, 940], widgets: { mode: one.mode, validation_prompt: one.preview, ...one.train } },
  };
  const links = [
    ["model", "ltx_model", "encode", "ltx_model"],
    ["dataset", "ltx_dataset", "encode", "ltx_dataset"],
    ["model", "ltx_model", "train", "ltx_model"],
    ["encode", "ltx_cache", "train", "data"],
  ];
  if (one.preview) {
    nodes.preview = { type: "LTXTrainValidationSettings", pos: [430, 390], size: [380, 560], widgets: { interval: 250, frames: one.frames ?? 49, width: 768, height: 512, ...(one.sound ? { generate_video: false } : {}) } };
    links.push(["preview", "validation", "train", "validation"]);
  }
  if (one.sampled) addSampling(one, nodes, links);
  if (one.modeSettings) {
    nodes.mode = { type: "LTXTrainModeSettings", pos: [430, 390], size: [380, 300], widgets: { base: one.mode, video_conditions: "{type: random_mask}\n{type: prefix, temporal_boundary: 1, temporal_boundary_max: 4, probability: 0.5}" } };
    links.push(["mode", "mode_settings", "train", "mode_settings"]);
  }
  return { nodes, links };
}

// ComfyUI's own nodes: sample with the LoRA that the train node hands on
function addSampling(one, nodes, links) {
  const [checkpoint, encoder] = MODELS[one.line];
  const column = (x, made) => {
    let y = 0;
    for (const [key, type, height, widgets, models] of made) {
      nodes[key] = { type, pos: [x, y], size: [340, height], widgets, models };
      y += height + 60;
    }
  };
  column(1370, [
    ["checkpoint", "CheckpointLoaderSimple", 100, { ckpt_name: checkpoint.name }, [checkpoint]],
    ["lora", "LoraLoaderModelOnly", 90, {}],
    ["clip", "LTXAVTextEncoderLoader", 110, { text_encoder: encoder.name, ckpt_name: checkpoint.name }, [encoder, checkpoint]],
    ["prompt", "CLIPTextEncode", 130, { text: one.sampled }],
    ["nothing", "ConditioningZeroOut", 40],
    ["conditioning", "LTXVConditioning", 80, { frame_rate: 24 }],
  ]);
  column(1760, [
    ["latent", "EmptyLTXVLatentVideo", 130, { width: 768, height: 512, length: 49 }],
    ["audio_vae", "LTXVAudioVAELoader", 60, { ckpt_name: checkpoint.name }, [checkpoint]],
    ["silence", "LTXVEmptyLatentAudio", 130, { frames_number: 49, frame_rate: 24 }],
    ["both", "LTXVConcatAVLatent", 60],
    ["sigmas", "LTXVScheduler", 170, { steps: 20 }],
    ["sampler", "KSamplerSelect", 60, { sampler_name: "euler" }],
  ]);
  column(2150, [
    ["sample", "SamplerCustom", 270, { noise_seed: 42, control_after_generate: "fixed", cfg: 3 }],
    ["split", "LTXVSeparateAVLatent", 60],
    ["pictures", "VAEDecode", 60],
    ["sound", "LTXVAudioVAEDecode", 60],
    ["video", "CreateVideo", 110, { fps: 24 }],
    ["save", "SaveVideo", 110, { filename_prefix: `${one.train.run_name}/part` }],
  ]);
  const slot = (from, to, input) => links.push([...from.split("."), to, input]);
  slot("checkpoint.MODEL", "lora", "model");
  slot("train.lora_name", "lora", "lora_name");
  slot("clip.CLIP", "prompt", "clip");
  slot("prompt.CONDITIONING", "nothing", "conditioning");
  slot("prompt.CONDITIONING", "conditioning", "positive");
  slot("nothing.CONDITIONING", "conditioning", "negative");
  slot("audio_vae.Audio VAE", "silence", "audio_vae");
  slot("latent.LATENT", "both", "video_latent");
  slot("silence.Latent", "both", "audio_latent");
  slot("both.latent", "sigmas", "latent");
  slot("lora.MODEL", "sample", "model");
  slot("conditioning.positive", "sample", "positive");
  slot("conditioning.negative", "sample", "negative");
  slot("sampler.SAMPLER", "sample", "sampler");
  slot("sigmas.SIGMAS", "sample", "sigmas");
  slot("both.latent", "sample", "latent_image");
  slot("sample.output", "split", "av_latent");
  slot("split.video_latent", "pictures", "samples");
  slot("checkpoint.VAE", "pictures", "vae");
  slot("split.audio_latent", "sound", "samples");
  slot("audio_vae.Audio VAE", "sound", "audio_vae");
  slot("pictures.IMAGE", "video", "images");
  slot("sound.Audio", "video", "audio");
  slot("video.VIDEO", "save", "video");
}

const { chromium } = createRequire(import.meta.url)(options.playwright);
const browser = await chromium.launch({ executablePath: options.chromium, args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
const page = await browser.newPage({ viewport: { width: 1500, height: 900 } });

/** A fresh page: in one that has built a graph, new nodes of the same id begin with the old ones' values. */
async function open() {
  await page.goto(options.url, { waitUntil: "domcontentloaded" });
  await page.waitForFunction(() => window.app?.graph && window.app?.extensionManager && document.querySelector("canvas"), null, { timeout: 120000 });
  await page.waitForTimeout(2000);
  await page.keyboard.press("Escape");
}

/** Gives the page the size that shows the whole graph, text and all, between the tool bars; where it then stands. */
async function wholeGraph() {
  const scale = 0.72;
  const left = 110, top = 130, edge = 24, bars = 120;
  const box = await page.evaluate(() => {
    const all = window.app.graph.nodes.map((node) => node.getBounding());
    const low = (k) => Math.min(...all.map((b) => b[k])), high = (k) => Math.max(...all.map((b) => b[k] + b[k + 2]));
    return { x: low(0), y: low(1), width: high(0) - low(0), height: high(1) - low(1) };
  });
  const width = Math.ceil(box.width * scale), height = Math.ceil(box.height * scale);
  await page.setViewportSize({ width: left + width + bars, height: top + height + bars });
  await page.waitForTimeout(500);
  await page.evaluate(({ box, scale, left, top }) => {
    const { canvas } = window.app;
    const corner = canvas.canvas.getBoundingClientRect();
    canvas.ds.scale = scale;
    canvas.ds.offset = [(left - corner.left) / scale - box.x, (top - corner.top) / scale - box.y];
    canvas.setDirty(true, true);
  }, { box, scale, left, top });
  await page.waitForTimeout(1200);
  return { x: left - edge, y: top - edge, width: width + 2 * edge, height: height + 2 * edge };
}

await open();
await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.Minimap.Visible", false));
await page.evaluate(() => window.app.extensionManager.setting.set("LiteGraph.Canvas.MinFontSizeForLOD", 0));
mkdirSync(options.twins, { recursive: true });

for (const one of EXAMPLES.filter((e) => e.title.includes(options.only ?? ""))) {
  await open();
  const made = await page.evaluate(async ({ nodes, links }) => {
    const { app, LiteGraph } = window;
    app.graph.clear();
    const built = {};
    let id = 0;
    for (const [key, spec] of Object.entries(nodes)) {
      const node = LiteGraph.createNode(spec.type);
      node.id = id += 1;
      app.graph.add(node);
      node.pos = spec.pos;
      for (const [name, value] of Object.entries(spec.widgets ?? {})) {
        const widget = node.widgets.find((w) => w.name === name) ?? (spec.type === "MarkdownNote" ? node.widgets[0] : null);
        if (!widget) throw new Error(`${spec.type} has no widget ${name}`);
        widget.value = value;
      }
      if (spec.models) node.properties.models = spec.models;
      node.setSize(spec.size);
      built[key] = node;
    }
    app.graph.last_node_id = id;
    for (const [from, output, to, input] of links) {
      const out = built[from].outputs.findIndex((o) => o.name === output);
      const slot = built[to].inputs.findIndex((i) => i.name === input);
      if (out < 0 || slot < 0) throw new Error(`no link ${from}.${output} -> ${to}.${input}`);
      built[from].connect(out, built[to], slot);
    }
    await new Promise((done) => setTimeout(done, 500));
    const { output } = await app.graphToPrompt();
    const graph = app.graph.serialize();
    for (const node of graph.nodes) {
      delete node.properties?.ltx_run;
      delete node.properties?.ltx_values;
      delete node.properties?.["Node name for S&R"];
      delete node.properties?.cnr_id;
      delete node.properties?.ver;
    }
    delete graph.extra;
    delete graph.id;
    return { graph, output };
  }, spec(one));
  const clip = await wholeGraph();
  writeFileSync(`${options.examples}/${one.title}.json`, `${JSON.stringify(made.graph, null, 1)}\n`);
  writeFileSync(`${options.twins}/${one.title}.api.json`, `${JSON.stringify(made.output, null, 1)}\n`);
  await page.screenshot({ path: `${options.examples}/${one.title}.jpg`, type: "jpeg", quality: 72, clip });
}
await browser.close();
